"""Colossal-AI's ``nn``: its learning-rate schedules."""

from . import lr_scheduler

__all__ = ["lr_scheduler"]
