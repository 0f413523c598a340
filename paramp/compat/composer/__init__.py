"""Composer's names: ``functional`` and ``algorithms``."""
