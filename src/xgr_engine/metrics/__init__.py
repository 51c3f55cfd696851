"""How good recommendations are: ranking metrics with intervals, and the evaluation of an output against the truth."""
