"""The session that ``amp.initialize`` creates, with the scale of each loss, and the global state that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ....precision.modes import Precision
from ....scaling.loss_scaler import DistributedGradScaler
from ....scaling.loss_scaling_options import LossScaling
from ...foreign_config_values import Properties
from .errors import AmpError
from .weight_and_gradient import AmpWeight


class _Steps(Protocol):
    """The part of an optimizer that a loss scaler uses."""

    overflows: dict[int, str]


NEVER = torch.iinfo(torch.int32).max


class LossScaler(DistributedGradScaler):
    """The scale of one loss, which changes if ``dynamic``, and the overflow flag of its last backwards."""

    def __init__(self, loss_id: int, scaling: LossScaling, *, dynamic: bool) -> None:
        if not dynamic:
            scaling = replace(scaling, growth_interval=NEVER, hysteresis=NEVER)
        # On the CPU: the only value from the device is the flag, which the host has to read in any case.
        super().__init__("cpu", **asdict(scaling))
        self.loss_id = loss_id
        self.dynamic = dynamic
        self._found_inf: torch.Tensor | None = None  # 0-dim, of backwards on which the ranks have not agreed yet
        self._optimizers: list[_Steps] = []

    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self.get_scale()

    @property
    def unskipped(self) -> int:
        """The number of backwards without overflow since the last overflow or growth."""
        return self._get_growth_tracker()

    # Apex's names, which scripts read and set.
    _loss_scale = property(loss_scale, lambda self, scale: self.load(scale, self.unskipped))
    _unskipped = property(lambda self: self.unskipped, lambda self, count: self.load(self.loss_scale(), count))

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Load a saved scale."""
        self.load_state_dict(self.state_dict() | {"scale": float(loss_scale), "_growth_tracker": int(unskipped)})

    def add_flag(self, found_inf: torch.Tensor, optimizers: Iterable[_Steps]) -> None:
        """Record this rank's overflow flag of a backward, 0-dim 0 or 1, for the gradients of ``optimizers``."""
        self._found_inf = found_inf if self._found_inf is None else torch.maximum(self._found_inf, found_inf)
        self._optimizers += [optimizer for optimizer in optimizers if optimizer not in self._optimizers]

    def awaits(self, optimizer: _Steps) -> bool:
        """Whether the ranks have not agreed yet on a backward for ``optimizer``."""
        return optimizer in self._optimizers

    def decide(self) -> None:
        """Agree with all ranks on the flag, update the scale, and after an overflow make the optimizers skip."""
        assert self._found_inf is not None
        self.agree(self._found_inf)
        overflow = bool(self._found_inf > 0)
        before = self.loss_scale()
        self.commit(torch.tensor(float(overflow)))
        if overflow:
            after = self.loss_scale()
            what = f"reducing loss scale to {after}" if after < before else f"keeping loss scale {after}"
            for optimizer in self._optimizers:
                optimizer.overflows[self.loss_id] = what
        self._found_inf, self._optimizers = None, []


@dataclass(eq=False)
class Session:
    """The models and optimizers of one ``amp.initialize``, and their precision."""

    precision: Precision
    properties: Properties
    loss_scalers: list[LossScaler]
    models: Sequence[nn.Module]
    weights: dict[int, AmpWeight] = field(default_factory=dict)
    """Every parameter that an optimizer steps, by the ``id`` of the model's weight."""
    known: set[int] = field(default_factory=set)
    """The ``id`` of every parameter that the models had in ``initialize``."""
    device: torch.device = field(init=False)
    """The device of the first model."""
    casts_active: bool = True
    """False inside ``amp.disable_casts()``."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Functions that restore the registered functions."""

    def __post_init__(self) -> None:
        self.device = next((parameter.device for parameter in self._parameters()), torch.device("cpu"))

    def current_ids(self) -> set[int]:
        """The ``id`` of every current parameter of the models."""
        return set(map(id, self._parameters()))

    def has_new(self) -> bool:
        """Whether a trained parameter was put into a model later, and no optimizer steps it."""
        new = (one for one in self._parameters() if id(one) not in self.known and id(one) not in self.weights)
        return any(one.requires_grad for one in new)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for model in self.models for parameter in model.parameters())


class AmpState:
    """amp's global state, with Apex's names. Scripts may read ``amp._amp_state.loss_scalers[0].loss_scale()``."""

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
        """The session; None after ``initialize(enabled=False)``, with which every call has no effect.

        Raises:
            AmpError: ``initialize`` has not been called.
        """
        if not self.initialized:
            raise AmpError(
                f"amp.{caller}: amp is not initialized; call model, optimizer = amp.initialize(model, optimizer, "
                "opt_level=...) first"
            )
        return self.session


state = AmpState()


def print_on_main(text: str) -> None:
    """Print ``text`` on the main rank, unless ``verbosity`` is 0."""
    main = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
    if main and state.verbosity > 0:
        print(text, flush=True)
