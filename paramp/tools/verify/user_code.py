"""Loading what the options name: the user's model, criterion, batches and plan."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...base.errors import ConfigError, nearest
from ...base.torch_internals import expect
from ...base.values_checked_by_type import user_path
from ...parallel.huggingface.model_output import main_output
from ...parallel.microbatches import Batch
from .options import Options, check_target

if TYPE_CHECKING:
    from ...engine.power_of_two_loss_divisor import Criterion

expect("torch.nn.modules.dropout._DropoutNd")


def load_attribute(text: str, option: str) -> Any:
    """Import what ``module:attribute`` or ``path/to/file.py:attribute`` names; a ConfigError if it does not exist."""
    check_target(text, option)
    where, _, name = text.rpartition(":")
    module = _load_file(user_path(where), option) if where.endswith(".py") else _import(where, option)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{option}: {where!r} has no {name!r}{nearest(part, vars(module))}")
        found = getattr(found, part)
    return found


def _import(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        fix = "run the command in its folder, or give the path of the file"
        raise ConfigError(f"{option}: no module {name!r} on Python's path; {fix}") from None


def _load_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{option}: no file {str(path)!r}")
    name = f"verified {path.resolve()}"  # cannot collide with another module
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_model(options: Options, seed: int) -> nn.Module:
    """The user's model in training mode. Without ``exact`` dropout is off, because its masks differ between layouts.

    Raises a ConfigError if the option does not name a module, or the module has no parameter to train.
    """
    found = load_attribute(options.model, "model")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    model = found if isinstance(found, nn.Module) else found() if _takes(found, 0) else None
    if not isinstance(model, nn.Module):
        expected = "an nn.Module, or a callable without arguments that returns one"
        raise ConfigError(f"model: {options.model!r} is {type(found).__name__}, expected {expected}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model: {options.model!r} has no parameter to train, expected at least one")
    if not options.exact:
        _disable_dropout(model)
    return model.train()


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _takes(found: Any, num_arguments: int) -> bool:
    """Whether the signature of ``found`` accepts ``num_arguments`` positional arguments."""
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True


def choose_criterion(options: Options, model: nn.Module, batch: Batch) -> Criterion | None:
    """The criterion of the options, else the model's ``loss``, else the cross-entropy.

    None, for the loss in the model's output, if ``batch``, the first, has no target.
    """
    if options.criterion is not None:
        found: Criterion = load_attribute(options.criterion, "criterion")
        return found
    loss = getattr(model, "loss", None)
    if callable(loss):
        return loss
    return None if batch.target is None else cross_entropy


def cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions; ``output`` or its ``logits``: (..., classes), ``target``: (...), int64."""
    return F.cross_entropy(main_output(output).flatten(0, -2), target.flatten())


def load_batches(options: Options, model: nn.Module, seed: int, size: int) -> Iterator[Batch]:
    """The global batch of each step, with the samples in dim 0; ``size`` random ones by default.

    Raises a ConfigError if the option names anything else, or too few batches.
    """
    if options.batches is None:
        generator, vocabulary = torch.Generator().manual_seed(seed), _vocabulary(model)
        for _ in range(options.steps):
            tokens = torch.randint(0, vocabulary, (size, options.seq_len + 1), generator=generator)
            yield Batch.of(tokens[:, :-1], tokens[:, 1:])
        return
    source = load_attribute(options.batches, "batches")
    if not (_takes(source, 1) if callable(source) else isinstance(source, Iterable)):
        expected = "a function of the step, or an iterable"
        raise ConfigError(f"batches: {options.batches!r} is {type(source).__name__}, expected {expected}")
    iterator = map(source, itertools.count(1)) if callable(source) else iter(source)
    for step in range(1, options.steps + 1):
        value = next(iterator, None)
        if value is None:
            raise ConfigError(f"batches: {options.batches!r} has {step - 1} batches, expected {options.steps}")
        if not isinstance(value, Mapping) and not (isinstance(value, (tuple, list)) and len(value) == 2):
            expected = "a pair (inputs, target), or a mapping of the model's keyword inputs"
            got = type(value).__name__
            raise ConfigError(f"batches: {options.batches!r} gave {got} for step {step}, expected {expected}")
        try:
            batch = Batch.of(value) if isinstance(value, Mapping) else Batch.of(*value)
            batch.rows(slice(0, batch.size))
        except ConfigError as error:
            raise ConfigError(f"batches: {options.batches!r}, step {step}: {error}") from None
        yield batch


def _vocabulary(model: nn.Module) -> int:
    """The vocabulary size of a model whose first layer is an embedding; a ConfigError for another model."""
    first = next((module for module in model.modules() if module._parameters), None)
    if not isinstance(first, nn.Embedding):
        what = "no layer with weights" if first is None else f"a {type(first).__name__} as its first layer"
        raise ConfigError(
            f"batches: {type(model).__name__} has {what} and no Embedding, so its inputs are not known; pass "
            "--batches module:function, a function of the step that returns (inputs, targets)"
        )
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    return known if isinstance(known, int) else first.num_embeddings
