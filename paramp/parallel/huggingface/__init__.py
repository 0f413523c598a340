"""Tensor-parallel plans, stages, initial weights and outputs of Hugging Face models; never imports transformers."""
