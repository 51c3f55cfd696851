"""Kernels that only the baselines run, each in plain torch and in Triton with one signature."""
