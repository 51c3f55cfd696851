"""Fused elementwise steps of a decoder layer: ``reference`` in plain torch, ``triton`` with the same signatures."""
