"""Gradients and their norm with the same bits on every layout."""
