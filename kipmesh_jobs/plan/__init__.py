"""The job `plan`: simulates a large cluster by Monte Carlo, with the production code of brokers and clients.

`fetches` (fetch bytes with and without sessions), `slots` (session caches under both policies), `failover` (a broker
failure by event and by record) and `producers` (metadata of many producers) each simulate one sample from a seed.
`simulation` runs them and creates the page. `seeds` compares the results with the proposals' figures. Time is
simulated, and a seed determines all figures.
"""
