"""The job ``kip-report``: the brokers' trace as evidence of what each KIP saves, by time and by client."""
