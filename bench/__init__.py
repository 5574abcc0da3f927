"""Figures of a local cluster: `python -m bench` (`make bench`) and `python -m bench.spark`; not part of the wheel."""
