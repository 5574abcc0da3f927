"""The processes of a mesh: asyncio joins the rules of `kipmesh.core` to files and network. `runtime` runs them."""
