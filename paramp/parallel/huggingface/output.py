"""The output of a Hugging Face model: its logits, in every layout."""

import inspect
from typing import Any

from torch import nn

from ...base.errors import ConfigError
from ...base.module_surgery import with_forward


def returning_logits(model: nn.Module) -> nn.Module:
    """``model`` with its logits as its output, and without a cache of keys and values."""
    check_output(model)
    options = call_options(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is not None:
            raise ConfigError(
                "labels: got a value, expected none, because the model's output is its logits and not its loss; leave "
                "labels out, and pass initialize a criterion of (logits, targets)"
            )
        return main_output(type(model).forward(changed, *args, **({**options, **kwargs, "return_dict": True})))

    changed = with_forward(model, forward)
    return changed


def check_output(model: nn.Module) -> None:
    """Check that the outputs of ``model`` have names."""
    if getattr(model.config, "return_dict", True) is False:
        raise ConfigError(
            f"model: the configuration of {type(model).__name__} has return_dict=False, expected True, so that its "
            "logits can be found by name"
        )


def call_options(model: nn.Module) -> dict[str, Any]:
    """The keyword arguments that disable the cache of keys and values, if ``model`` has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}


def main_output(output: Any) -> Any:
    """The logits in ``output``; for a model without a head, its last hidden state; else ``output``."""
    named = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
    return next((value for value in named if value is not None), output)
