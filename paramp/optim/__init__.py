"""From scaled gradients to new weights: flat buffers, masters, ZeRO, the optimizer step."""
