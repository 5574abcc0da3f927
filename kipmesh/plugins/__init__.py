"""Finding and loading what others wrote for us; for nodes and clients alike."""
