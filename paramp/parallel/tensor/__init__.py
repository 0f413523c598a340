"""Sharding of layers over the tensor axis: plans, styles, their computation on local tensors, and the loss."""
