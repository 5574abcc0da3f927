"""The job `audit`: the files of all replicas beside each other: which agree up to which offset, and where they do not.

`folders` finds the files, `scan` reads a segment's bytes, `source` is both as ``format("kipmesh-segments")``, `compare`
finds gaps and differences, `findings` names them, `job` puts them together. Nothing is written to what is read.
"""
