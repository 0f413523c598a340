"""``paramp verify``: a model on a layout against itself in one process."""
