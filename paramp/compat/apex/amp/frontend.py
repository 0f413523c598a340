"""``amp.initialize``, ``reset``, ``master_params``, ``state_dict`` and ``load_state_dict``."""

import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ....base.errors import ConfigError
from ....precision.fp32_routers import keep_routers_wide
from ....precision.modes import Precision
from ....scaling.loss_scaling_options import LossScaling
from ...foreign_config_values import AMP_TYPE, OPT_LEVELS, Properties, apex_properties
from .errors import AmpError
from .models import AmpForward, Casts, cast_models, check_models, keep_state_dicts_fp32, refuse_assigned_weights
from .optimizers import ApexOptimizer, check_optimizers
from .session import LossScaler, Session, print_on_main, state
from .user_function_casts import patch_registered

Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

OVERRIDES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
"""Arguments that override properties of the level."""
OPTIONS = ("cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale")
"""Arguments that are not properties of a level."""


def initialize(
    models: Models,
    optimizers: Optimizers | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> Any:
    """Prepare models and optimizers for a level of precision; ``apex.amp.initialize``.

    Call it once, with models in fp32 on their device, after tensor parallelism and before DistributedDataParallel.
    Every rank calls it with the same arguments, except its own models.

    Args:
        models, optimizers: one or a list of each; no optimizers for inference.
        enabled: False: every call of amp does nothing.
        opt_level: ``"O0"`` to ``"O3"``.
        cast_model_type: the dtype of weights under O2 and O3, such as ``torch.bfloat16``.
        patch_torch_functions: False: O1 without its casts.
        keep_batchnorm_fp32: batch norms stay in fp32 (O2), or not (O3).
        master_weights: optimizers step fp32 masters (O2).
        loss_scale: a number, or ``"dynamic"``.
        cast_model_outputs: the dtype of the models' floating-point outputs. None: fp32.
        num_losses: the number of losses with separate scales; see ``loss_id`` of ``scale_loss``.
        verbosity: 0: nothing is printed. Otherwise the main rank prints the options, and each skipped step.
        min_loss_scale, max_loss_scale: limits of a dynamic scale, which begins at 2**16 and doubles after 2000
            backwards without overflow.

    Returns:
        ``models`` if ``optimizers`` is None, else ``(models, optimizers)``; each a list if a list was passed. They are
        the same objects.

    Raises:
        AmpError: an invalid argument, a model in half precision or in a wrapper, a second call.
    """
    arguments = locals()
    if enabled or state.session is not None:
        overrides, options = ({name: arguments[name] for name in names} for names in (OVERRIDES, OPTIONS))
        model_list = _as_list("models", models)
        optimizer_list = [] if optimizers is None else _as_list("optimizers", optimizers)
        _begin(model_list, optimizer_list, opt_level, overrides, options)
        models = model_list if isinstance(models, (list, tuple)) else models
        optimizers = optimizer_list if isinstance(optimizers, (list, tuple)) else optimizers
    state.initialized = True
    return models if optimizers is None else (models, optimizers)


def _begin(
    models: list[Any], optimizers: list[Any], opt_level: str, overrides: dict[str, Any], options: dict[str, Any]
) -> None:
    """Check everything, then begin the session."""
    if state.session is not None:
        raise AmpError(
            "amp.initialize: it was called before; pass all models and optimizers to one call, as lists, or call "
            "amp.reset() first to start over with new ones"
        )
    try:
        properties = apex_properties(opt_level, overrides)
        precision = Precision.parse({"mode": AMP_TYPE.APEX, "opt_level": opt_level, **overrides, **options})
    except ConfigError as error:
        raise AmpError(str(error)) from None
    check_models(models, cast=precision.weights is not torch.float32)
    check_optimizers(optimizers)
    state.verbosity = options["verbosity"]
    _print_options(opt_level, overrides, properties)
    scaling = precision.scaling or LossScaling.static(1.0)
    dynamic = properties.loss_scale == "dynamic"
    scalers = [LossScaler(loss_id, scaling, dynamic=dynamic) for loss_id in range(options["num_losses"])]
    state.session = Session(precision, properties, scalers, models)
    _prepare(state.session, optimizers, cast_outputs=options["cast_model_outputs"] is not None)


def _as_list(name: str, given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, (nn.Module, torch.optim.Optimizer)):
        return [given]
    raise AmpError(f"{name}: got {type(given).__name__}, expected one or a list of them")


def _prepare(session: Session, optimizers: Sequence[torch.optim.Optimizer], *, cast_outputs: bool) -> None:
    precision, properties = session.precision, session.properties
    casts_models = properties.cast_model_type is not None
    pairs = cast_models(session.models, precision) if casts_models else []  # kept alive, so that no id is reused
    replaced = {id(old): new for old, new in pairs}
    inputs = precision.weights if casts_models else None
    casts = Casts(precision, inputs=inputs, outputs=precision.outputs if cast_outputs else None)
    for model in session.models:
        keep_routers_wide(model, precision)
        model.forward = AmpForward(model, casts)
    if precision.weights.itemsize < 4:
        keep_state_dicts_fp32(session.models)
    refuse_assigned_weights(session.models)
    session.known = session.current_ids()
    for optimizer in optimizers:
        ApexOptimizer(optimizer, session, replaced, session.known)
    if properties.patch_torch_functions:
        session.undo += patch_registered()


def _print_options(opt_level: str, overrides: Mapping[str, Any], properties: Properties) -> None:
    def table(values: Mapping[str, Any]) -> str:
        return "".join(f"\n  {name:22}: {value}" for name, value in values.items())

    print_on_main(f"amp: opt_level {opt_level}, with the options{table(asdict(OPT_LEVELS[opt_level]))}")
    changed = {name: value for name, value in overrides.items() if value is not None}
    if changed:
        print_on_main(f"amp: after overrides of {', '.join(changed)}, the options are{table(asdict(properties))}")


def reset() -> None:
    """Discard the session of :func:`initialize`, so that it can be called again, in tests and notebooks.

    Registered functions are restored. Old models and optimizers are not changed, and must not be used with amp any
    more, except that models which were never cast (O0, O1) may be passed to ``initialize`` again with new optimizers.
    """
    if state.session is not None:
        for undo in reversed(state.session.undo):
            undo()
    state.session, state.initialized, state.verbosity = None, False, 1


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that ``optimizer`` steps: fp32 masters if the level has them, else the model's parameters.

    Clip the gradients of these tensors, after ``scale_loss``: with ``torch.nn.utils.clip_grad_norm_`` in one process
    and under data parallelism, with :func:`paramp.clip_grad_norm_` in every layout.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """The scale of each loss, in Apex's format: ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}}``.

    Args:
        destination: the mapping to write to. None: a new ``OrderedDict``.
    """
    state.require("state_dict")
    saved: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    for scaler in state.loss_scalers:
        saved[f"loss_scaler{scaler.loss_id}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler.unskipped}
    return saved


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load a state from :func:`state_dict`, of this module or of Apex. Warns if the number of losses differs.

    Raises:
        AmpError: an entry that does not belong to a loss scaler.
    """
    state.require("load_state_dict")
    scalers = {f"loss_scaler{scaler.loss_id}": scaler for scaler in state.loss_scalers}
    unknown = [
        name
        for name, entry in state_dict.items()
        if not (isinstance(name, str) and re.fullmatch(r"loss_scaler\d+", name))
        or not (isinstance(entry, Mapping) and {"loss_scale", "unskipped"} <= set(entry))
    ]
    if unknown:
        raise AmpError(
            f"amp.load_state_dict: unexpected {', '.join(map(repr, unknown))}, expected entries such as "
            "'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}"
        )
    if state.session is not None and len(state_dict) != len(scalers):
        warnings.warn(
            f"amp.load_state_dict: got {len(state_dict)} loss scalers, but num_losses is {len(scalers)}; the "
            "first ones are loaded",
            stacklevel=2,
        )
    for name, scaler in scalers.items():
        if name in state_dict:
            scaler.load(state_dict[name]["loss_scale"], state_dict[name]["unskipped"])
