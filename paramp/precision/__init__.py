"""The precision modes: the table of modes, autocast, fp16 emulation, norms, float8."""
