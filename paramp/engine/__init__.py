"""The engine: a step of training over every layout."""
