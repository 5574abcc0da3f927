"""Chaos: faults on a local cluster of processes under a workload whose history is checked.

`experiment` is what a file says, `runner` does it: `faults` through `network` and `disk`, `workload` beside it. The
checker is `kipmesh_chaos.history_checker`. Clusters come by the protocol in `mesh`: who runs an experiment brings
one.
"""
