"""The rules, sans-IO: no grpc, asyncio, clock, disk or randomness; time and chance come in as arguments."""
