"""The job `plan`: a mesh at a scale that no machine here has, by Monte-Carlo over the cores of brokers and clients.

`fetches` (fetch bytes with and without sessions), `slots` (session caches under both policies), `failover` (a broker's
failure by event and by record) and `producers` (metadata of many producers) each simulate one sample from a seed;
`simulation` lists the samples, adds them up and makes the page; `seeds` sets the figures of the proposals beside what
is computed. Simulated time only: no sample reads a clock, and the same seed gives the same figures.
"""
