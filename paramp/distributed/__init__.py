"""Launchers, rendezvous, the mesh of ranks, liveness and random streams."""
