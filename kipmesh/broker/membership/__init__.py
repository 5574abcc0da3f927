"""A broker's membership in the cluster: registration, heartbeats, the metadata observer and calls to the controller."""
