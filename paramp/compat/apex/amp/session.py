"""What one ``amp.initialize`` set up, with the scale of each loss: Apex's other calls find it in the global state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ....optim.loss_scaler import DistributedGradScaler
from ....precision.foreign_options import Properties
from ....precision.policy import LossScaling, Precision
from .errors import AmpError
from .weights import AmpWeight


class _Steps(Protocol):
    """What of an optimizer a loss scaler knows."""

    overflows: dict[int, str]


class LossScaler:
    """The scale of one loss, which moves if ``dynamic``, and what its last backwards found."""

    def __init__(self, loss_id: int, scaling: LossScaling, *, dynamic: bool) -> None:
        # Apex begins at the ceiling where that is below the usual first scale.
        first = min(scaling.init_scale, scaling.max_scale or scaling.init_scale)
        # On the CPU: the one value that comes from the device is the flag, and the host has to see that in any case.
        self._scaler = DistributedGradScaler("cpu", **asdict(replace(scaling, init_scale=first)))
        self.loss_id = loss_id
        self.dynamic = dynamic
        self._found_inf: torch.Tensor | None = None  # 0-dim, of the backwards that the ranks have not agreed on yet
        self._optimizers: list[_Steps] = []

    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self._scaler.get_scale()

    @property
    def unskipped(self) -> int:
        """Backwards without overflow since the last overflow or growth."""
        return self._scaler._get_growth_tracker()

    # The names under which scripts have read and set Apex's.
    _loss_scale = property(loss_scale, lambda self, scale: self.load(scale, self.unskipped))
    _unskipped = property(lambda self: self.unskipped, lambda self, count: self.load(self.loss_scale(), count))

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Go on from a saved scale."""
        saved = {"scale": float(loss_scale), "_growth_tracker": int(unskipped)}
        self._scaler.load_state_dict(self._scaler.state_dict() | saved)

    def add_findings(self, found_inf: torch.Tensor, optimizers: Iterable[_Steps]) -> None:
        """Remember what this rank found in a backward, 0-dim 0 or 1, for the gradients of ``optimizers``."""
        self._found_inf = found_inf if self._found_inf is None else torch.maximum(self._found_inf, found_inf)
        self._optimizers += [optimizer for optimizer in optimizers if optimizer not in self._optimizers]

    def awaits(self, optimizer: _Steps) -> bool:
        """Whether the ranks have not agreed yet on a backward for ``optimizer``."""
        return optimizer in self._optimizers

    def agree(self) -> None:
        """Agree with all ranks on the findings, move the scale, and after an overflow let the optimizers skip."""
        assert self._found_inf is not None
        self._scaler.agree_(self._found_inf)
        overflow = bool(self._found_inf > 0)
        before = self.loss_scale()
        if self.dynamic:
            self._scaler.update_from_flag(torch.tensor(float(overflow)))
        else:
            self.load(before, 0 if overflow else self.unskipped + 1)
        if overflow:
            after = self.loss_scale()
            what = f"reducing loss scale to {after}" if after < before else f"keeping loss scale {after}"
            for optimizer in self._optimizers:
                optimizer.overflows[self.loss_id] = what
        self._found_inf, self._optimizers = None, []


@dataclass(eq=False)
class Session:
    """The models and optimizers that one ``amp.initialize`` was given, and how they compute."""

    precision: Precision
    properties: Properties
    loss_scalers: list[LossScaler]
    models: Sequence[nn.Module]
    weights: dict[int, AmpWeight] = field(default_factory=dict)
    """Every parameter that an optimizer steps, by the ``id`` of the model's weight."""
    device: torch.device = field(init=False)
    """Where the first model computes."""
    casts_active: bool = True
    """False inside ``amp.disable_casts()``."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What puts registered functions back."""

    def __post_init__(self) -> None:
        parameters = (parameter for model in self.models for parameter in model.parameters())
        self.device = next((parameter.device for parameter in parameters), torch.device("cpu"))

    def current_ids(self) -> set[int]:
        """``id`` of every parameter that the models have now."""
        return {id(parameter) for model in self.models for parameter in model.parameters()}


class AmpState:
    """Where Apex's calls find each other. Scripts that read ``amp._amp_state.loss_scalers[0].loss_scale()`` may."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.initialized = False
        self.verbosity = 1

    @property
    def loss_scalers(self) -> list[LossScaler]:
        return [] if self.session is None else self.session.loss_scalers

    @property
    def weights(self) -> dict[int, AmpWeight]:
        return {} if self.session is None else self.session.weights

    @property
    def opt_properties(self) -> Properties | None:
        return None if self.session is None else self.session.properties

    def require(self, caller: str) -> Session | None:
        """The session; None where ``initialize(enabled=False)`` makes every call do nothing.

        Raises:
            AmpError: ``initialize`` has not been called.
        """
        if not self.initialized:
            raise AmpError(
                f"amp.{caller}: amp is not initialized; call model, optimizer = amp.initialize(model, optimizer, "
                "opt_level=...) before"
            )
        return self.session


state = AmpState()


def print_on_main(text: str) -> None:
    """Print ``text`` on the main rank, unless ``verbosity`` is 0."""
    main = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
    if main and state.verbosity > 0:
        print(text, flush=True)
