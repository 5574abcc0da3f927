"""Administration of a cluster. `admin.AdminClient` is the entry point; the other modules hold one subject each."""
