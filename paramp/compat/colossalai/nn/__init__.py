"""Colossal-AI's ``nn``: its learning-rate schedules."""
