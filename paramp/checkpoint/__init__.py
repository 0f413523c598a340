"""Checkpoints: tensors under the whole model's names, written atomically, read in any layout."""
