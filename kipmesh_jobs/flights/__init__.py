"""The main job: a year of flights from New York, streamed from a topic, joined with the weather and reported.

`dataset` loads the input, `feed` writes it to a topic, `values` parses the topic, `streams` runs the streaming queries,
`results` computes tables and checks, `job` is the command and its page. The topic has one JSON object per flight, keyed
by carrier, with the CSV's columns.
"""
