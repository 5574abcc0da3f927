"""Membership of a broker in the cluster: registration, heartbeats, metadata observer and requests to the controller."""
