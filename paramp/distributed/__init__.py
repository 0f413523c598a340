"""Launchers, rendezvous, the mesh of ranks, collectives, liveness and random streams."""
