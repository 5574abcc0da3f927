"""The follower service: a broker that is preferred as replica."""
