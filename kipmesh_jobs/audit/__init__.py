"""The job `audit`: compares the files of all replicas and reports damage and differences.

`inventory` finds the files, `scan` parses a segment, `source` provides both as `format("kipmesh-segments")`, `compare`
finds gaps and differences, `findings` classifies them, and `job` runs it all. The audited files are never written.
"""
