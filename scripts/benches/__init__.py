"""What the benchmarks of `scripts/bench_*.py` share."""
