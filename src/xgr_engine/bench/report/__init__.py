"""The report as one HTML page without anything outside it."""
