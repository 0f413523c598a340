"""A CUDA device that is not there: runs code for GPUs on a CPU build of torch, without values. Import it before torch.

Under :class:`Device` tensors on ``cuda`` have shapes, dtypes and no values, and tensors on the CPU are torch's.
Autograd runs the backward in its thread for the device, as on a GPU, and :func:`world` makes torch's fake process
group. :data:`waits` lists what a GPU would make the host wait for, with the lines that it comes from. An operator that
mixes devices raises.

What it cannot show: values, kernels, streams and their races, the order of collectives.

It is known to work with torch 2.13.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if "torch" in sys.modules:
    raise ImportError("fake_cuda has to be imported before torch, which looks for its devices when it is loaded")
GUARD = Path(__file__).with_name("guard.cpp")
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def _load_guard() -> None:
    """Build ``guard.cpp`` for this torch, and load it before ``torch._C``, which looks for a device's hooks once."""
    version = (TORCH / "version.py").read_text().partition("__version__ = '")[2].partition("'")[0]
    changed = int(GUARD.stat().st_mtime)
    built = Path(tempfile.gettempdir(), f"fake_cuda_{version}_{changed}_{os.getuid()}.so")
    if not built.exists():
        includes = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
        part = built.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-fPIC", "-O1", "-std=c++20", "-w"]
        subprocess.run(["g++", *options, *includes, str(GUARD), "-o", str(part)], check=True)
        part.replace(built)
    for name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(TORCH / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)


_load_guard()
os.environ["TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION"] = "1"  # the device runs no kernels of Triton's

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._tools.fake_collectives  # noqa: E402  collectives of fake tensors
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

fake_tensor.init_gpu_context = lambda *_, **__: None
aten = torch.ops.aten


class _Waits(list[tuple[str, tuple[str, ...]]]):
    """Everything that the host has waited for since the last :meth:`begin_step`, up to :meth:`end_step`: what, and
    where, as ``path:line function`` of frames outside torch, innermost first."""

    step = 0
    _counts = True

    def begin_step(self) -> None:
        self.step += 1
        self._counts = True
        self.clear()

    def end_step(self) -> None:
        self._counts = False

    def add(self, what: str) -> None:
        if self._counts:
            self.append((what, _lines()))


waits = _Waits()
OURS = (f"{os.sep}torch{os.sep}", f"{os.sep}fake_cuda{os.sep}", "<", f"{os.sep}contextlib.py", f"{os.sep}threading.py")


def _lines() -> tuple[str, ...]:
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 6:
        code = frame.f_code
        if not any(part in code.co_filename for part in OURS):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(found) or ("autograd's thread for the device",)


# ------------------------------------------------------------------------------------------------------- torch.cuda


def _nothing(*_: Any, **__: Any) -> None: ...


class _Event:
    """Waiting for an event of the step that runs counts; for one of an earlier step, which has long been made, not."""

    wait = _nothing

    _step = -1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        self._step = waits.step

    def synchronize(self) -> None:
        if self._step == waits.step:
            waits.add("Event.synchronize in the step of its record")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        self.synchronize()
        return 1.0


class _Stream:
    cuda_stream = stream_id = 0
    device = torch.device("cuda", 0)
    __init__ = wait_event = wait_stream = __exit__ = _nothing

    def __enter__(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        waits.add("Stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


GENERATOR = torch.Generator()
"""The device's generator of random numbers. Kernels draw nothing; a program may draw from it."""
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=2**36, multi_processor_count=132
)
_VALUES: dict[str, Any] = {"current_stream": _Stream(), "default_stream": _Stream(), "stream": contextlib.nullcontext()}
"""What functions of ``torch.cuda`` return."""
_VALUES["device"] = contextlib.nullcontext()  # as a context, which makes one the current device
_VALUES |= {"device_count": 1, "current_device": 0, "is_available": True, "is_initialized": True}
_VALUES |= {"get_device_capability": (9, 0), "get_device_name": _PROPERTIES.name, "get_device_properties": _PROPERTIES}
_VALUES |= {"is_bf16_supported": True, "get_amp_supported_dtype": [torch.float16, torch.bfloat16]}
_VALUES |= {"memory_allocated": 0, "max_memory_allocated": 0, "_is_in_bad_fork": False}
_VALUES |= dict.fromkeys(("init", "_lazy_init", "_lazy_call", "set_device", "set_stream", "empty_cache", "ipc_collect"))
_VALUES["reset_peak_memory_stats"] = None
for _name, _value in _VALUES.items():
    setattr(torch.cuda, _name, lambda *_, _value=_value, **__: _value)
torch.cuda.Event, torch.cuda.Stream = _Event, _Stream
torch.cuda.synchronize = lambda *_: waits.add("torch.cuda.synchronize")
torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: GENERATOR.manual_seed(seed + 1)  # not as the CPU's
torch.cuda.get_rng_state = lambda *_: GENERATOR.get_state()
torch.cuda.set_rng_state = lambda state, *_: GENERATOR.set_state(state)


# ------------------------------------------------------------------------------------------------------- the device

_DEVICE = torch.ops.prim.device.default
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.item.default}
_SIZES_FROM_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operators whose output has a size that the host has to read."""
_INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}
_COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
_WITHOUT_FAKE = {"_fused_sgd_", "_fused_adagrad_"}
"""Operators that change their arguments, for which torch has no fake kernel."""
_NAMES: dict[Any, str] = {}
_COLLECTIVES = {"c10d", "_c10d_functional", "_dtensor"}
SMALL = 64
"""Elements up to which a tensor's values are followed, where they come from the host: scales, flags, counts."""


class Device(FakeTensorMode):
    """Under it, tensors on ``cuda`` are fake and tensors on the CPU are real.

    Values that come from the host and are computed from such values are followed in small tensors, so that flags and
    counts read what a program wrote. Collectives leave them: every rank has those of this one. All else reads 0.
    """

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operator goes through torch's compiler once more, which takes as long as the rest

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # most calls
            return fake_tensor._device_handler(args)
        kwargs = dict(kwargs) if kwargs else {}
        leaves = _leaves(args, kwargs)
        fake = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]
        if not fake and not any(type(leaf) is torch.device and leaf.type == "cuda" for leaf in leaves):
            return function(*args, **kwargs)
        if function in _READS:
            return self._read(function, args)
        name = _NAMES.get(function) or _NAMES.setdefault(function, function.name().split("::")[1].split(".")[0])
        if name in _SIZES_FROM_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            waits.add(f"size that depends on values ({function})")
        elif name in _INDEXING:
            self._see_index(function, args[0], args[1])
        elif name in _COPIES:
            copied = self._copy(function, name, args, kwargs)
            if copied is not None:
                return copied
        elif name in _WITHOUT_FAKE:
            if on_host := [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "cuda"]:
                raise RuntimeError(f"{function}: expected all tensors on the device, got {on_host}")
            return None
        given = tuple(args), kwargs
        if any(type(leaf) in (torch.Tensor, torch.nn.Parameter) for leaf in leaves):
            given = tree_map(self._faked, given)
        result = self.dispatch(function, types, *given)
        if all(leaf.numel() <= SMALL for leaf in fake) and function.namespace not in _COLLECTIVES:
            self._follow(function, leaves, args, kwargs, result)
        return result

    def _follow(self, function: Any, leaves: list[Any], args: Any, kwargs: Any, result: Any) -> None:
        """Give the small ``result`` of ``function`` its values, if those of all its arguments are known."""
        if torch.Tag.nondeterministic_seeded in function.tags or "as_strided" in function.name():
            return
        if any(map(torch.is_storage, leaves)):
            vars(args[0]).pop("host_values", None)
            return
        results = [one for one in tree_leaves(result) if isinstance(one, FakeTensor)]
        known = all(_known(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if not known or not results or any(one.numel() > SMALL for one in results):
            return
        real_args, real_kwargs = tree_map(_on_host, (tuple(args), kwargs))
        for one, values in zip(results, tree_leaves(function(*real_args, **real_kwargs)), strict=True):
            one.host_values = values.zero_() if "empty" in function.name() else values

    def _read(self, function: Any, args: Any) -> Any:
        waits.add(f"host read ({function})")
        value = args[0]
        if function is not aten._local_scalar_dense.default:
            return False
        if hasattr(value, "host_values"):
            return value.host_values.item()
        return False if value.dtype is torch.bool else 0.0 if value.is_floating_point() else 0

    def _see_index(self, function: Any, whole: Any, indices: Any) -> None:
        for index in (one for one in indices if one is not None):
            if index.dtype in (torch.bool, torch.uint8):
                waits.add(f"size that depends on values ({function} by a mask)")
            elif index.device != whole.device and index.ndim:
                waits.add(f"blocking copy of an index to the device ({function})")

    def _copy(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """See copies between host and device; the result of one to the host, else None."""
        non_blocking = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if name == "_to_copy":
            (source,), device, target = args, kwargs.get("device") or args[0].device, None
            if (source.device.type, device.type) == ("cuda", "cpu"):
                dtype = kwargs.get("dtype") or source.dtype
                target = torch.zeros(source.shape, dtype=dtype, pin_memory=non_blocking)
            copies = [(target, device, source)]
        else:
            pairs = [args[:2]] if name == "copy_" else zip(*args[:2], strict=True)
            copies = [(target, target.device, source) for target, source in pairs]
        for target, device, source in copies:
            if {device.type, source.device.type} == {"cpu", "cuda"}:
                if not non_blocking:
                    waits.add(f"blocking copy from {source.device.type} to {device.type} ({function})")
                elif device.type == "cpu" and not target.is_pinned():
                    waits.add(f"copy from cuda to memory of the host that is not pinned ({function})")
        if name == "_foreach_copy_" or target is None or device.type != "cpu":
            return None
        return target.copy_(source.host_values) if hasattr(source, "host_values") else target.zero_()

    def _faked(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return value
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(self, meta, value.device)


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    """All values of an operator's arguments, of lists too."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(value) if isinstance(value, (list, tuple)) else found.append(value)
    return found


def _known(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return hasattr(tensor, "host_values") and tensor.host_values.shape == tensor.shape
    return type(tensor) is torch.Tensor and tensor.numel() <= SMALL


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return value.host_values if isinstance(value, FakeTensor) else value


@functools.cache
def _fake_class(kind: type[torch.Tensor]) -> type[FakeTensor]:
    return FakeTensor if kind is torch.Tensor else type(kind.__name__, (kind, FakeTensor), {})


def _as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """``tensor.as_subclass(kind)``. A fake tensor stays one, which torch's method would make a tensor on meta."""
    if not isinstance(tensor, FakeTensor):
        return _TORCHS_AS_SUBCLASS(tensor, kind)
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _fake_class(kind)(tensor.fake_mode, meta, tensor.device)


def _swap_tensors(kept: torch.Tensor, other: torch.Tensor) -> None:
    """``torch.utils.swap_tensors``, by which ``Module.to`` moves fake parameters. Those that are there stay."""
    if not isinstance(kept, FakeTensor) or (kept.device, kept.dtype) != (other.device, other.dtype):
        _TORCHS_SWAP_TENSORS(kept, other)


_TORCHS_AS_SUBCLASS, torch.Tensor.as_subclass = torch.Tensor.as_subclass, _as_subclass
_TORCHS_SWAP_TENSORS, torch.utils.swap_tensors = torch.utils.swap_tensors, _swap_tensors


# -------------------------------------------------------------------------------------------------------- the world


class Objects:
    """Python objects that ranks broadcast: those of a rank are there for the ranks that run after it.

    They are known by the line that broadcasts, so a rank that did not run yet has those of another one at that line.
    """

    def __init__(self) -> None:
        self._sent: dict[str, list[Any]] = {}

    def broadcast(self, objects: list[Any], src: Any = None, group: Any = None, group_src: int = 0) -> None:
        waits.add("exchange of objects (broadcast_object_list)")
        line = _lines()[0]
        if dist.get_rank(group) == group_src:
            if any(one is not None for one in objects):
                self._sent[line] = objects[:]
        else:
            objects[:] = self._sent.get(line, objects)


def _all_gather(everyone: list[Any], value: Any, group: Any = None) -> None:
    waits.add("exchange of objects (all_gather_object)")
    everyone[:] = [value] * dist.get_world_size(group)


def _receive(tensor: torch.Tensor, *_: Any, **__: Any) -> int:
    tensor.fill_(1)
    return 0


@contextlib.contextmanager
def world(rank: int, size: int, objects: Objects) -> Iterator[None]:
    """The default process group is torch's fake one, as seen by ``rank``.

    Collectives leave tensors as they are. Objects of other ranks are those of this one, or of ``objects``; what is
    received from another rank is ones.
    """
    replaced = {"all_gather_object": _all_gather, "broadcast_object_list": objects.broadcast, "recv": _receive}
    with mock.patch.multiple(dist, **replaced):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
