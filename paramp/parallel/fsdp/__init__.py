"""Parameters sharded over data ranks by torch's FSDP2."""
