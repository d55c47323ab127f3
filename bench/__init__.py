"""Benchmarks: each prints the table that docs/performance.md holds, with its limits measured in the same run."""
