"""The loss scaler, the norm of the whole model, and reports of overflows: usable alone."""
