"""Optimizers whose update needs whole matrices, where ranks have shards: Muon, Adafactor, LAMB and unknown classes."""
