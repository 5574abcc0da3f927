"""The main job: a year of flights out of New York, streamed from a topic, joined with the weather, and reported.

`dataset` is the real input, `streams` the structured streams, `results` the tables that people read and the proofs,
`job` the command and its page. The topic holds one JSON object a flight, keyed by carrier, with the column names of the
CSV.
"""
