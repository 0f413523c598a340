"""What a user changes in a model's weights between steps: values in place, and whole parameters."""
