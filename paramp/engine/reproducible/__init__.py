"""Training with the same bits on every layout: setting it up, and running batches in chunks."""
