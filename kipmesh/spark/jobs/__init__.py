"""Spark jobs over the mesh, a package each."""
