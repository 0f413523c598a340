"""What one ``amp.initialize`` set up, which Apex's other calls find by themselves: the one global of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ....precision.foreign_options import Properties
from ....precision.policy import Precision
from .errors import AmpError
from .loss_scaler import LossScaler
from .weights import AmpWeight


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
