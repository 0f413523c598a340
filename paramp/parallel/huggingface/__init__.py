"""Plans, stages, initial weights, files and outputs of Hugging Face models; imports transformers only to use files."""
