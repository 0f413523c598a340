"""A process ends without an abort, however late gloo's threads release the tensors of their last collectives."""

import importlib
from unittest import mock

import pytest
import torch
from commands import COLD, python, succeeded

LATE = """
import time
import torch
import torch.distributed as dist
import paramp.base.collectives


class Late:
    def __del__(self):
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
        print("released")


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1 << 22)
tensor.late = Late()
dist.all_reduce(tensor, async_op=True)
del tensor
"""
"""A program that ends while a thread of gloo's has a tensor that nothing else holds, and runs ``Late.__del__``."""


def test_a_process_ends_after_its_threads_have_released_their_tensors(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE, encoding="utf-8")
    result = succeeded(python(str(path), **COLD))
    assert result.stdout == "released\n"
    assert "terminate called" not in result.stderr


def test_a_forked_process_waits_for_no_thread_of_its_own():
    """Processes of the tests are forked: Python then has another number for the main thread."""
    program = "from paramp.base.wait_for_gloo_at_exit import _states; print([*_states()])"
    assert succeeded(python("-c", program)).stdout == "[]\n"


@pytest.mark.parametrize("failed", [False, True])
def test_an_adopted_accelerator_ends_the_group_with_the_process(monkeypatch, failed):
    adopted = importlib.import_module("paramp.integrations.accelerate")
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    adopted._end_group_at_exit.__wrapped__()
    (end,) = registered
    if failed:
        monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    with mock.patch.object(torch.distributed, "destroy_process_group") as destroy:
        for initialized in (False, True):
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda initialized=initialized: initialized)
            end()
    assert destroy.call_count == (not failed)
