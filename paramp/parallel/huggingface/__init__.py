"""Hugging Face models: their tensor-parallel plans, pipeline stages, initial weights and outputs.

Nothing here imports transformers.
"""
