"""The main job: a year of flights out of New York, streamed from a topic, joined with the weather, and reported.

`dataset` is the real input, `pipeline` the structured stream, `aggregates` the tables that people read, `report` the
page. The topic holds one JSON object a flight, keyed by carrier, with the column names of the CSV.
"""
