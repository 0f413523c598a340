"""Where tokens and batches come from, and which of them each data rank gets."""
