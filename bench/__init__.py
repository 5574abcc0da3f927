"""Benchmarks of local clusters: run `python -m bench` (`make bench`) and `python -m bench.NAME`. Not in the wheel."""
