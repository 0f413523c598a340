"""Checkpoints with tensors under the whole model's names, written atomically and read in any layout."""
