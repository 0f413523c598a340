"""Whether a backward runs: what a forward asks that activation checkpointing may repeat."""

from __future__ import annotations

import torch

from .torch_internals import expect

expect("torch._C._current_graph_task_id")


def in_backward() -> bool:
    """Whether this thread runs a backward. A forward in it is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1
