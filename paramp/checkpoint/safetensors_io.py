"""Files of tensors in the safetensors format: a JSON header and raw bytes, so that reading them runs no code.

::

    uint64      length of the header, little-endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    bytes       the tensors, row-major, little-endian, one after the other

(https://github.com/huggingface/safetensors, "Format".) The package ``safetensors`` reads them. It can write only
tensors that are all in memory at once, and computes no checksum, so files are written here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..base.errors import CheckpointError
from .atomic_dir import Written, write_file

_UNSIGNED = {"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
_SIGNED = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_OTHERS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool}
DTYPES = _UNSIGNED | _SIGNED | _FLOATS | _OTHERS
"""The format's name of each dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensor: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors, one after the other, and sync them to the disk.

    Args:
        shapes: dtype and shape of each, by name.
        tensor: returns the tensor of a name, of that dtype and shape, on any device; called once for each.

    Raises:
        CheckpointError: the format does not support a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in NAMES:
            raise CheckpointError(f"{name}: a tensor of {dtype}, which the safetensors format does not support")
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes

    def parts() -> Iterator[Any]:
        yield struct.pack("<Q", len(text))
        yield text
        for name in shapes:
            # as bytes, since NumPy has neither bfloat16 nor float8
            yield tensor(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, parts())


class TensorFile:
    """A safetensors file, open for reading. It is memory-mapped, so that only the requested parts are read.

    Raises:
        CheckpointError: it is not a safetensors file, or not complete.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """``descriptor``: of the file, if it is open already; then ``path`` is for messages only."""
        self.path = path
        if descriptor is None:
            path.open("rb").close()  # Python's OSError names the file and the problem; the package's does not
        try:
            self._file = safe_open(path if descriptor is None else f"/dev/fd/{descriptor}", framework="pt")
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
            self.shapes = {name: (DTYPES[item.get_dtype()], tuple(item.get_shape())) for name, item in slices.items()}
            """Dtype and shape of each tensor, by name."""
        except (SafetensorError, KeyError) as error:
            reason = f"a tensor of the dtype {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{str(path)!r} is not a complete safetensors file ({reason}); download it again, or convert it to "
                "that format"
            ) from None

    def read(self, name: str, ranges: tuple[slice, ...] = ()) -> torch.Tensor:
        """The values at ``ranges``, one for each dim, of the tensor ``name``; by default all of it. On the CPU."""
        return self._file.get_slice(name)[ranges] if ranges else self._file.get_tensor(name)
