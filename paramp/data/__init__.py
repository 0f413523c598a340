"""Token sources, sampling, and data loaders sharded over the data axis."""
