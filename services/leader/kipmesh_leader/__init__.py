"""The leader service: a broker that is preferred as leader."""
