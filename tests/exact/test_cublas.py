"""What ``reproducible`` sets for the whole process: cuBLAS' workspace before CUDA begins, one thread for kernels."""

import os

import pytest
import torch
from small_engines import each_raises, engine_of

import paramp
from paramp.base.errors import ConfigError
from paramp.distributed import launch_from_torch_mpi_slurm
from paramp.distributed.exact_mode_protocol import numerics_of
from paramp.exact.exact_mode import VARIABLE, choose_workspace


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)


class CudaBegins(Exception):
    """Raised where a launch would first use the GPU."""


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", None, "cpu"])
def test_a_launch_sets_the_workspace_before_cuda_begins(unset, monkeypatch, device, reproducible):
    found = []

    def set_device(*_):
        found.append(os.environ.get(VARIABLE))
        raise CudaBegins

    monkeypatch.setattr(launch_from_torch_mpi_slurm, "_set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CudaBegins):
        paramp.launch_from_torch({"reproducible": reproducible}, device=device)
    assert found == [":4096:8" if reproducible and device != "cpu" else None]


@pytest.mark.parametrize("initialized", [True, False])
def test_a_workspace_that_is_missing_or_another_one_is_an_error(unset, monkeypatch, initialized):
    """One that fits is kept."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    for value in (":4096:8", ":16:8"):
        monkeypatch.setenv(VARIABLE, value)
        choose_workspace()
        assert os.environ[VARIABLE] == value
    monkeypatch.setenv(VARIABLE, ":0:0")
    another = r"got ':0:0', expected ':4096:8' or ':16:8', because reproducible is set"
    each_raises(ConfigError, {another: choose_workspace})
    if initialized:
        monkeypatch.delenv(VARIABLE)
        missing = r"not set, but CUDA is in use already.*set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        each_raises(ConfigError, {missing: choose_workspace})
        assert VARIABLE not in os.environ


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_deterministic_algorithms_end_with_the_context(unset, before):
    def now():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with paramp.launch_from_torch({"reproducible": True}, device="cpu") as context:
            context.device = torch.device("cuda")
            numerics_of(context.config).prepare(context, model, optimizers)
            numerics_of(context.config).prepare(context, model, optimizers)  # of a second engine
            assert now() == (True, False)
            context.device = torch.device("cpu")
        assert now() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_kernels_have_one_thread_from_initialize_on_and_in_each_batch():
    before = torch.get_num_threads()
    try:
        with paramp.launch_from_torch({"reproducible": True}, device="cpu"):
            torch.set_num_threads(2)
            engine = engine_of(torch.nn.Linear(4, 4))
            assert torch.get_num_threads() == 1
            torch.set_num_threads(2)
            engine.forward_backward(torch.ones(8, 4), torch.ones(8, 4))
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
