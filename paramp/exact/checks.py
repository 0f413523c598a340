"""Modules and parameters whose results would depend on the layout."""

from collections import defaultdict

from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import BATCH_NORMS, num_hooks


def check_modules(model: nn.Module) -> None:
    """Raise a ConfigError for a module whose results depend on what else is in the batch, or on its order."""
    for name, module in model.named_modules():
        problem = None
        if isinstance(module, BATCH_NORMS) or getattr(module, "track_running_stats", False):
            problem = "averages over the samples of a batch, which differ between layouts; use GroupNorm or LayerNorm"
        elif isinstance(module, nn.MultiheadAttention):
            problem = "computes all heads in one product; use F.scaled_dot_product_attention in a module of your own"
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        ):
            problem = (
                "changes its weights in the forward, has sparse gradients, or scales them by what is in the batch; "
                "set max_norm=None, sparse=False, scale_grad_by_freq=False"
            )
        if problem is not None:
            raise ConfigError(f"reproducible: {name!r} is a {type(module).__name__}, which {problem}")


def check_ties(model: nn.Module) -> None:
    """Raise a ConfigError for a tied parameter whose gradients are not the sum of two, or are not seen whole."""
    names_of: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    for parameter, names in names_of.items():
        if len(names) > 2:
            raise ConfigError(
                f"reproducible: {' and '.join(names)} are one parameter, expected at most two names: the order in "
                "which the gradients of three are added depends on the stages that have them"
            )
        if len(names) > 1 and num_hooks(parameter):
            raise ConfigError(
                f"reproducible: {' and '.join(names)} are one parameter with hooks, which would run on the gradient of "
                "its first use only; remove them"
            )
