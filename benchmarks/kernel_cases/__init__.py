"""Sections of ``benchmarks/kernels.py``."""
