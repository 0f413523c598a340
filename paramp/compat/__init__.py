"""The names and behaviour of other systems, each whole in its folder: Colossal-AI, NVIDIA Apex, Composer."""
