"""kipmesh's rules, sans-IO: no gRPC, asyncio, clock, disk or randomness. Time and random values are arguments."""
