"""The model that :func:`paramp.initialize` was given, which a user may still have.

Under a pipeline the ranks train stages of it. The object has all modules, and on each rank the weights that other ranks
train as they were before.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ..base.dtensor import is_dtensor
from ..pipeline.stage import Stages


class RefuseStale:
    """A hook of a module that refuses its forward and its ``state_dict()`` while an engine trains stages of the model.

    It refuses those of no copy, but that it is pickled.
    """

    def __init__(self, module: nn.Module, stages: nn.Module, elsewhere: str) -> None:
        """``stages``: the module of those of this rank; ``elsewhere``: a parameter that another rank trains."""
        self._module, self._stages = weakref.ref(module), weakref.ref(stages)
        self._text = (
            f"model: another stage trains {elsewhere!r}, so the model that initialize was given has old weights; use "
            "engine.full_state_dict(), engine.save_pretrained(folder) or, after engine.eval(), engine(x)"
        )

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self._module() and self._stages() is not None:
            raise RuntimeError(self._text)

    def __deepcopy__(self, _: Any) -> RefuseStale:
        return self

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(self._text)


def unguard(model: nn.Module) -> None:
    """Allow again what an earlier engine refused of ``model``, which is to train anew.

    That engine may have got this model, one that it is a copy of, or one inside of it.
    """
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, RefuseStale)]:
                del hooks[key]


def guard(model: nn.Module, stages: Stages) -> None:
    """Refuse what ``model``, and modules in it, cannot do while this rank has a part of it, its ``stages``."""
    redirect_saving(model)
    elsewhere = {reference(): name for name, reference in stages.elsewhere}
    for module in model.modules() if elsewhere else ():
        name = next((elsewhere[one] for one in module.parameters() if one in elsewhere), None)
        if name is None or isinstance(module, torch.jit.ScriptModule):  # which accepts no hooks
            continue
        refuse = RefuseStale(module, stages.module, name)
        # Tables of its own: stages share those that it had.
        module._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)
        module._state_dict_pre_hooks = OrderedDict(module._state_dict_pre_hooks)
        module.register_forward_pre_hook(refuse)
        module.register_state_dict_pre_hook(refuse)


def redirect_saving(model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """Make ``save_pretrained`` of own values an error, of the modules in ``model`` that lack some on this rank.

    They have a sharded parameter, or one of those ``elsewhere``, the names of those on other stages.
    """
    for path, module in model.named_modules():
        if hasattr(type(module), "save_pretrained"):
            prefix = f"{path}." if path else ""
            is_part = any(name.startswith(prefix) for name in elsewhere)
            if is_part or any(map(is_dtensor, module.parameters())):
                module.__dict__["save_pretrained"] = partial(_save_whole, module)


def _save_whole(module: Any, *args: Any, **options: Any) -> Any:
    if options.get("state_dict") is not None:  # such as engine.full_state_dict(), on rank 0
        return type(module).save_pretrained(module, *args, **options)
    raise RuntimeError(
        "save_pretrained: this rank has a part of the model only; call engine.save_pretrained(folder) on every rank"
    )
