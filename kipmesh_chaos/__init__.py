"""Chaos experiments: inject faults into a cluster under load and check the recorded history.

`experiment` parses the YAML file and `runner` runs it. `faults` injects faults through `network` and `disk` while
`workload` writes and reads. `history_checker` checks the history. The caller supplies the cluster: see the protocols in
`target_cluster`.
"""
