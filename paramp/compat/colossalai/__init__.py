"""Colossal-AI's names."""
