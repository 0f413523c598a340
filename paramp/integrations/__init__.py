"""Plugins for trainers that bring their own loop."""
