"""Data loaders that are sharded over the data axis, and their positions."""
