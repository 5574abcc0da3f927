"""`make demo`: the main job on real input, with a report and checks.

Starts a cluster of processes in three racks, produces a year of flights with acks=all, streams the topic through Spark
into Parquet and a report. Then checks that the output equals the input and that the replicas are identical bytes. `run`
has the steps, `proofs` the checks; the stream and its tables come from `kipmesh_jobs.flights`.
"""
