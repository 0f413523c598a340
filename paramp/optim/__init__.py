"""From gradients to new weights: loss scaler, gradient norm, flat buffers, masters, ZeRO, the optimizer step."""
