"""``paramp verify``: compares a model on a layout with the same model in one process."""
