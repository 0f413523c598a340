"""Export, import and inspection of checkpoints, in one process."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ..base.errors import CheckpointError, ConfigError
from ..base.values_checked_by_type import user_path
from .atomic_dir import HEADER, MANIFEST, PARTIAL, make_folder, new_folder, publish, publish_file, unnamed
from .header import MODEL, StoredSlice, StoredTensor, write_header
from .open_checkpoint import OpenCheckpoint
from .resharding import read_tensor
from .safetensors_io import TensorFile, write_tensors
from .sharded_save import rank_file


def export_weights(checkpoint: str | Path, to: str | Path, dtype: torch.dtype | None = torch.float32) -> Path:
    """Write the weights of a checkpoint, unsharded and under the model's names, to one safetensors file.

    Args:
        to: the file; other programs expect the suffix ``.safetensors``.
        dtype: the dtype of floating-point weights. None: the stored dtype, which is fp32 if the mode has masters.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        ConfigError: ``to`` exists already; or a finite weight above :data:`MASKED` is infinite in ``dtype``.
    """
    checkpoint, to = user_path(checkpoint), _new_path(to)
    with OpenCheckpoint(checkpoint) as source:
        if damage := source.problems():
            raise CheckpointError(damage[0])
        tensors = source.header.tensors
        names = {name.removeprefix(MODEL): name for name in tensors if name.startswith(MODEL)}

        def written(name: str) -> torch.dtype:
            stored = tensors[names[name]].dtype
            return dtype if dtype is not None and stored.is_floating_point else stored

        make_folder(to.parent)
        partial = unnamed(to)
        try:
            write_tensors(
                partial,
                {name: (written(name), tensors[names[name]].shape) for name in names},
                lambda name: _cast(read_tensor(source, names[name]), written(name), name),
                metadata={"format": "pt"},  # Hugging Face's loaders require it
            )
            publish_file(partial, to)
        finally:
            partial.unlink(missing_ok=True)  # it does not exist if the export succeeded
    return to


MASKED = -1e9
"""Where masks begin, whose numbers may become -inf. A checkpoint does not tell them from weights, which are higher."""


def _cast(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = value.to(dtype)
    if problem := overflow(value, cast):
        raise ConfigError(f"--dtype: {name} has {problem}; choose a dtype with a larger range, or stored")
    return cast


def overflow(value: torch.Tensor, cast: torch.Tensor) -> str | None:
    """Which finite values overflow in ``cast``, ``value`` in another dtype, perhaps on another device; None: none."""
    if not value.is_floating_point() or torch.finfo(cast.dtype).max >= torch.finfo(value.dtype).max:
        return None
    infinite = ~cast.float().isfinite()  # float8 has no isfinite
    if not infinite.any():
        return None
    value = value.to(cast.device)
    lost = value[infinite & value.isfinite() & (value > MASKED)]
    if not len(lost):
        return None
    return f"values up to {lost.abs().max():g}, which overflow in {str(cast.dtype).removeprefix('torch.')}"


def import_weights(file: str | Path, to: str | Path) -> Path:
    """Make a weights-only checkpoint from a safetensors file; :meth:`paramp.Engine.load` reads it in any layout.

    Raises:
        CheckpointError: the file is not a complete safetensors file.
        ConfigError: ``to`` exists already.
        OSError: the file cannot be read.
    """
    file, to = user_path(file), _new_path(to)
    source, stored_in = TensorFile(file), rank_file(0)
    shapes = {f"{MODEL}{name}": shape for name, shape in source.shapes.items()}
    tensors = [
        StoredTensor(name, dtype, shape, (StoredSlice((0,) * len(shape), shape, stored_in),))
        for name, (dtype, shape) in shapes.items()
    ]
    with new_folder(to) as partial:
        written = write_tensors(partial / stored_in, shapes, lambda name: source.read(name.removeprefix(MODEL)))
        header = write_header(partial, {"imported": file.name}, tensors)
        publish(partial, to, {stored_in: written, HEADER: header})
    return to


def _new_path(to: str | Path) -> Path:
    path = user_path(to)
    if path.exists():
        raise ConfigError(f"--to: {str(path)!r} exists already; move it away, or choose another name")
    return path


def inspect(checkpoint: str | Path) -> dict[str, Any]:
    """The content of a checkpoint: ``damage`` (messages; empty if it is intact), ``values`` and ``tensors``.

    If the manifest or header cannot be read, only ``path`` and ``damage``. Of a folder of checkpoints, ``checkpoints``:
    for each the step, the date and what else there is to list; ``damage`` is then that of all of them.
    """
    content: dict[str, Any] = {"path": str(checkpoint)}
    if inside := _checkpoints_in(user_path(checkpoint)):
        listed = [_entry(path) for path in inside]
        return content | {"damage": [line for entry in listed for line in entry["damage"]], "checkpoints": listed}
    try:
        opened = OpenCheckpoint(checkpoint)
    except CheckpointError as error:
        return content | {"damage": [str(error)]}
    with opened:
        content["damage"] = opened.problems()
        try:
            header = opened.header
        except (CheckpointError, OSError):
            return content
        return content | {
            "bytes": sum(file.size for file in opened.files.values()),
            "files": len(opened.files),
            "unknown_files": opened.other_files(),
            "values": header.values,
            "tensors": {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in header.tensors.items()
            },
        }


def _checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by name, with those whose saving was interrupted; none if it is one itself."""
    if not folder.is_dir() or (folder / MANIFEST).exists() or (folder / HEADER).exists():
        return []
    inside = [path for path in folder.iterdir() if path.is_dir()]
    return sorted(
        path for path in inside if PARTIAL in path.name or (path / MANIFEST).exists() or (path / HEADER).exists()
    )


def _entry(path: Path) -> dict[str, Any]:
    """The line of a checkpoint in the list of its folder."""
    if PARTIAL in path.name:
        return {"name": path.name, "damage": [f"{str(path)!r} is unfinished: saving it was interrupted"]}
    found = inspect(path)
    values, saved = found.get("values", {}), (path / MANIFEST).stat().st_mtime if (path / MANIFEST).exists() else None
    return {
        "name": path.name,
        "damage": found["damage"],
        "steps": values["counts"][0] if "counts" in values else None,
        "skipped": values["counts"][1] if "counts" in values else None,
        "layout": values.get("layout"),
        "bytes": found.get("bytes"),
        "saved": None if saved is None else datetime.fromtimestamp(saved).isoformat(" ", "seconds"),
    }


def _listed(found: Mapping[str, Any]) -> str:
    """A folder of checkpoints as a table."""
    rows = [("checkpoint", "steps", "skipped", "layout", "size", "saved", "")]
    for entry in found["checkpoints"]:
        layout = ", ".join(f"{name} {size}" for name, size in (entry.get("layout") or {}).items())
        size = f"{entry['bytes'] / 1e6:,.1f} MB" if entry.get("bytes") is not None else ""
        counts = [str(entry[name]) if entry.get(name) is not None else "" for name in ("steps", "skipped")]
        state = f"incomplete: {entry['damage'][0]}" if entry["damage"] else "complete"
        rows.append((entry["name"], *counts, layout, size, entry.get("saved") or "", state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    number = len(rows) - 1
    lines = [f"{found['path']}: {number} checkpoint{'s' if number > 1 else ''}"]
    for name, *cells, state in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True)]
        lines.append("  ".join((f"  {name:{widths[0]}}", *aligned, state)).rstrip())
    return "\n".join(lines)


def describe(found: Mapping[str, Any]) -> str:
    """The result of :func:`inspect` as text."""
    if "checkpoints" in found:
        return _listed(found)
    lines = [f"{found['path']}: " + ("damaged" if found["damage"] else "complete")]
    lines += [f"  {line}" for line in found["damage"]]
    if "values" not in found:
        return "\n".join(lines)
    lines.append(f"{found['bytes']:,} bytes in {found['files']} files, all with checksums")
    lines += [f"  {name} is not one of them, and is not read" for name in found["unknown_files"]]
    lines += _facts(found["values"])
    tensors = found["tensors"]
    weights = {name: item for name, item in tensors.items() if name.startswith(MODEL)}
    num_elements = sum(torch.Size(item["shape"]).numel() for item in weights.values())
    lines.append(f"{len(weights)} weights and buffers, {num_elements:,} elements; {len(tensors)} tensors")
    width = max((len(name) for name in weights), default=0)
    lines += [f"  {name:{width}}  {item['dtype']:9} {tuple(item['shape'])}" for name, item in weights.items()]
    others = Counter(name.split(".")[0] for name in tensors.keys() - weights.keys())
    lines += [f"  {count} of {kind}.*" for kind, count in sorted(others.items())]
    return "\n".join(lines)


def _facts(values: Mapping[str, Any]) -> Sequence[str]:
    if "layout" not in values:
        return [f"weights only, imported from {values.get('imported')}"]
    layout = values["layout"]
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items())
    scaler = values["scaler"]
    lines = [
        f"saved after {values['counts'][0]} steps, {values['counts'][1]} skipped; {sizes}",
        f"precision {values['config']['precision']}; {values['optimizer']}, {len(values['groups'])} param groups",
        f"loss scale {scaler['scale']:g}" if scaler else "no loss scale",
    ]
    tracked = ", ".join(values["tracked"])
    return [*lines, f"tracked: {tracked}"] if tracked else lines
