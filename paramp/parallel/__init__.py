"""Sharding of models over the tensor axis, and partitioning over the pipeline axis."""
