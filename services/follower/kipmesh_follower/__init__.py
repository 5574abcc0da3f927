"""The follower service."""
