"""``xgr bench``: workloads, contenders, measurements, reports. docs/benchmarking.md says what the figures mean."""
