"""The spelling of Colossal-AI's ``amp`` package."""

from ..precision import AMP_TYPE

__all__ = ["AMP_TYPE"]
