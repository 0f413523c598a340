"""Composer's interface: ``from paramp.compat.composer import functional, algorithms``."""

from . import algorithms, functional

__all__ = ["algorithms", "functional"]
