"""The parts of an engine's training state, each as chunks of a checkpoint; and the whole model in one process."""
