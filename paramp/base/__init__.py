"""Helpers for every package: errors, coercion of options, module surgery, DTensor helpers."""
