"""Layers, losses and functions whose results have the same bits on every layout."""
