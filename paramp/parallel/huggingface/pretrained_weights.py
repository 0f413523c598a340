"""Weights of a Hugging Face model: initial ones, by its ``_init_weights``, and folders that ``from_pretrained`` reads.

A folder is written from gathered weights, or read tensor by tensor. It holds ``config.json`` and safetensors files,
whose names and shapes may differ from the model's, as where a file has one tensor for each expert. transformers knows
how, in both directions.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import named_tensors, names_by_parameter
from ..materialize import outline

CONVERSIONS = "_weight_conversions"
"""An attribute that ``from_pretrained`` gives to a model."""
FILES = ("model.safetensors.index.json", "model.safetensors")


def write_folder(module: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write ``weights``, the full tensors of a model by name, to a folder that ``from_pretrained`` reads.

    Args:
        module: the model, or one of its pipeline stages.
        weights: on the CPU; those of one parameter are one tensor. Emptied.
    """
    whole = whole_on_meta(module)
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    whole.to(dtype)  # the dtype in config.json
    whole.save_pretrained(folder, state_dict=weights)


def whole_on_meta(module: nn.Module) -> Any:
    """The model of which ``module`` is a pipeline stage, or all, on ``meta``; with its adapters, if it has some."""
    kind: Any = type(module)
    with torch.device("meta"):
        whole = kind(copy.deepcopy(module.config))
    for name in (CONVERSIONS, "generation_config"):
        if name in module.__dict__:
            whole.__dict__[name] = module.__dict__[name]
    for name, adapter in getattr(module, "peft_config", {}).items():
        whole.add_adapter(adapter, name)  # then only adapters are written
    return whole


def is_from_folder(model: nn.Module) -> bool:
    """Whether ``from_pretrained`` made ``model``, so that its values are in files."""
    return CONVERSIONS in model.__dict__


class PretrainedFiles:
    """The values of ``model``, which ``from_pretrained`` put on ``meta``, in its files. Called with a tensor's name.

    A tensor that is stored as the model has it is a view of the mapped file: only what is used of it is read. Of a
    stack of experts that are stored one by one, those are read that the rank keeps.

    Raises:
        ConfigError: there are no safetensors files where ``model`` was loaded from.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._sources: dict[str, tuple[str, list[tuple[str, str | None]]]] = {}
        self._file_of = _files(self._model)
        self._open: dict[Path, Any] = {}
        self._find_sources()
        for names in names_by_parameter(model).values():  # a tied parameter is stored under one of its names
            stored = next((name for name in names if name in self._sources), None)
            if stored is not None:
                self._sources |= dict.fromkeys(names, self._sources[stored])

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __call__(self, name: str, kept: Sequence[int]) -> torch.Tensor | None:
        """The tensor ``name`` of the model, on the CPU, in the file's dtype; None if there is none.

        Along dim 0, what is not at the indices ``kept`` may be zeros.
        """
        if name not in self._sources:
            return None
        first, sources = self._sources[name]
        if all(pattern is None for _, pattern in sources):
            return self._read(sources[-1][0])
        by_pattern: defaultdict[str, list[str]] = defaultdict(list)
        for stored, pattern in sources:
            assert pattern is not None
            by_pattern[pattern].append(stored)
        first_pattern, names = next(iter(by_pattern.items()))
        count = len(names)
        if not self._is_stack(first_pattern) or not 0 < len(kept) < count:
            return self._converted(first, by_pattern).get(name)
        part = self._converted(first, {key: [stored[at] for at in kept] for key, stored in by_pattern.items()})[name]
        whole = part.new_zeros(count, *part.shape[1:])  # memory that is not written to takes none
        whole[list(kept)] = part
        return whole

    def _find_sources(self) -> None:
        """Find out which tensors of the files each tensor of the model is made of."""
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        transforms = getattr(self._model, CONVERSIONS)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = {
            pattern: one for one in transforms if not isinstance(one, WeightRenaming) for pattern in one.source_patterns
        }
        expected = self._model.state_dict()
        prefix = self._model.base_model_prefix
        for stored in sorted(self._file_of, key=_numbered):  # in a stack, expert 2 comes before expert 10
            name, pattern = rename_source_key(stored, renamings, list(self._converters.values()), prefix, expected)
            if name not in expected and stored in expected:
                name, pattern = rename_source_key(stored, [], [], prefix, expected)
            entry = self._sources.setdefault(name, (name, []))
            entry[1].append((stored, pattern))
            if pattern is not None:
                first, *others = self._converters[pattern].target_patterns
                self._sources |= {name.replace(first, other): entry for other in others}

    def _is_stack(self, pattern: str) -> bool:
        """Whether what is stored as ``pattern`` is put one behind the other along dim 0, and stays so."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        merge, *others = self._converters[pattern].operations
        is_stack = isinstance(merge, MergeModulelist) and merge.dim == 0
        return is_stack and all(isinstance(one, Concatenate) and one.dim > 0 for one in others)

    def _converted(self, first: str, sources: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
        """The tensors that transformers makes of the stored ones of each pattern, by name."""
        converter = copy.deepcopy(self._converters[next(iter(sources))])
        for pattern, names in sources.items():
            for stored in names:
                converter.add_tensor(first, stored, pattern, self._read(stored))
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, stored: str) -> torch.Tensor:
        from safetensors import safe_open

        path = self._file_of[stored]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        tensor: torch.Tensor = self._open[path].get_tensor(stored)
        return tensor


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts names with their indices as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _files(model: Any) -> Mapping[str, Path]:
    """The safetensors file that has each stored tensor."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    source = model.config._name_or_path

    def find(name: str) -> str | None:
        commit = getattr(model.config, "_commit_hash", None)
        try:  # in the folder, or in the cache of downloads
            return cached_file(source, name, local_files_only=True, revision=commit)
        except OSError:
            return None

    index, single = (find(name) if source else None for name in FILES)
    if index is not None:
        found: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return {name: Path(find(file) or file) for name, file in found.items()}
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), Path(single))
    raise ConfigError(
        f"model: {type(model).__name__} is on the meta device, and was loaded from {source!r}, where there is neither "
        f"{' nor '.join(FILES)}; load it on the CPU, or write its weights there with save_pretrained"
    )


def pretrained_filler(model: nn.Module, stored: Container[str] = ()) -> Callable[[nn.Module], None]:
    """A function that fills the tensors of one module of ``model``: the model's own ``_init_weights``.

    It need not fill the tensors of the names ``stored``.

    It is checked on ``meta`` first, where it costs nothing: the tensors' versions show which of them it writes.
    Raises ConfigError if it skips a tensor, or writes tensors of another module.
    """
    tried = outline(model)
    names_of: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named_tensors(tried, remove_duplicate=False):
        if tensor.is_meta:
            names_of.setdefault(tensor, []).append(name)

    owners = _owners(model)

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        owners.get(type(module), model)._init_weights(module)  # type: ignore[operator]

    written: dict[torch.Tensor, list[str]] = {tensor: [] for tensor in names_of}
    for name, module in tried.named_modules():
        before = {tensor: tensor._version for _, tensor in named_tensors(module) if tensor.is_meta}
        fill(module)
        for tensor, version in before.items():
            if tensor._version != version:
                written[tensor].append(name)
    for tensor, names in names_of.items():
        if not any(name in stored for name in names) and written[tensor] != [name.rpartition(".")[0] for name in names]:
            by = " and ".join(repr(name) for name in written[tensor]) or "no module"
            raise ConfigError(
                f"model: {names[0]!r} of {type(model).__name__} is on the meta device, but its _init_weights "
                f"fills it for {by}, expected one call for each module that has it; build the model on the CPU"
            )
    return fill


def _owners(model: nn.Module) -> dict[type[nn.Module], nn.Module]:
    """The model that initialises modules of a class, for classes that only one of the models in ``model`` has."""
    found: dict[type[nn.Module], set[nn.Module]] = {}
    inner = {name: module for name, module in model.named_modules() if hasattr(module, "_init_weights")}
    for name, module in model.named_modules():
        parent = name
        while parent and parent not in inner:
            parent = parent.rpartition(".")[0]
        found.setdefault(type(module), set()).add(inner[parent])
    return {kind: next(iter(owners)) for kind, owners in found.items() if len(owners) == 1}
