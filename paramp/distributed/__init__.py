"""Processes: launchers, rendezvous, the mesh of ranks, collectives, liveness, random streams."""
