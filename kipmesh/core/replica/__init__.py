"""Log truth: what a leader knows of its replicas, and what a follower does with the leader's answers."""
