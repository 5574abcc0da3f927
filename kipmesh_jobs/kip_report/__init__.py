"""The job `kip-report`: the benefit of each KIP, from the brokers' trace, over time and by client."""
