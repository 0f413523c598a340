"""The model that :func:`paramp.initialize` was given, which a user may still have.

Under a pipeline the ranks train stages of it. The object has all modules, and on each rank the weights that other ranks
train as they were before.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NoReturn

from torch import nn

from ..base.dtensor import is_dtensor
from ..pipeline.stage import Stages


class RefuseStale:
    """A hook of a model that refuses its forward and its ``state_dict()`` while an engine trains stages of it.

    It refuses those of no copy, but that it is pickled.
    """

    def __init__(self, model: nn.Module, stages: nn.Module, elsewhere: str) -> None:
        """``stages``: the module of those of this rank; ``elsewhere``: a parameter that another rank trains."""
        self._model, self._stages = weakref.ref(model), weakref.ref(stages)
        self._text = (
            f"model: another stage trains {elsewhere!r}, so the model that initialize was given has old weights; use "
            "engine.full_state_dict(), engine.save_pretrained(folder) or, after engine.eval(), engine(x)"
        )

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self._model() and self._stages() is not None:
            raise RuntimeError(self._text)

    def __deepcopy__(self, _: Any) -> RefuseStale:
        return self

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(self._text)


class GivenModel:
    """A ``model`` that is to train anew. What an earlier engine refused of it is allowed again, until :meth:`guard`.

    That engine may have got this model, one that it is a copy of, or one inside of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
                for key in [key for key, hook in hooks.items() if isinstance(hook, RefuseStale)]:
                    del hooks[key]

    def guard(self, stages: Stages) -> None:
        """Refuse what the model cannot do while this rank has a part of it, its ``stages``."""
        model = self._model
        redirect_saving(model)
        if stages.elsewhere:
            refuse = RefuseStale(model, stages.module, stages.elsewhere[0][0])
            # Tables of its own: stages share those that it had.
            model._forward_pre_hooks = OrderedDict(model._forward_pre_hooks)
            model._state_dict_pre_hooks = OrderedDict(model._state_dict_pre_hooks)
            model.register_forward_pre_hook(refuse)
            model.register_state_dict_pre_hook(refuse)


def redirect_saving(module: nn.Module, *, is_part: bool = False) -> None:
    """Make ``module.save_pretrained`` of its own values an error if a parameter is sharded, or ``module`` is a part."""

    own: Any = type(module)

    def save(*args: Any, **options: Any) -> Any:
        if options.get("state_dict") is not None:  # such as engine.full_state_dict(), on rank 0
            return own.save_pretrained(module, *args, **options)
        raise RuntimeError(
            "save_pretrained: this rank has a part of the model only; call engine.save_pretrained(folder) on every rank"
        )

    if hasattr(module, "save_pretrained") and (is_part or any(map(is_dtensor, module.parameters()))):
        module.__dict__["save_pretrained"] = save
