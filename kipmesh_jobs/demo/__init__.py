"""`make demo`: the main job on real input, from an empty folder to a report and its proof.

It starts a mesh of processes in three racks, produces a year of flights into it with acks=all, streams the topic
through Spark into Parquet and a report, and then proves that what came out is what went in and that the replicas are
the same bytes. Steps are in `run`, proofs in `proofs`; the stream and its tables are those of
`kipmesh_jobs.flights`.
"""
