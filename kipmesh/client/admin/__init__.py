"""Administration of a cluster. `admin.AdminClient` is the entry point; each other module has one subject."""
