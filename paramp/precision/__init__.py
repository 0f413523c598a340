"""What a mode stores, computes and scales in, and how: the table of modes, autocast, emulation, norms, float8."""
