"""``apex.amp``, with the same functions and behaviour.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

Four levels define the precisions (:data:`paramp.compat.foreign_config_values.OPT_LEVELS`): O0 everything in fp32;
O1 fp32 weights and casts of operations' inputs; O2 fp16 weights with fp32 masters, batch norms in fp32; O3 everything
in fp16.

The path of a gradient: the backward stores it in the model's weight; when the ``with`` block ends, it is redistributed
to its parameter's placements, copied to the master in fp32 if there is one, checked, and divided by the scale; the
unscaled gradients of earlier losses are added. All ranks then agree in one all-reduce of a flag.

Beyond Apex: CPUs (with emulated fp16 products if necessary), bf16, DTensor parameters, pipeline stages, models
whose ``state_dict`` has the masters, and a skipped step after a non-finite gradient under a static scale too.
"""

from .errors import AmpError
from .frontend import initialize, load_state_dict, master_params, reset, state_dict
from .scaling import scale_loss
from .session import state as _amp_state
from .user_function_casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "AmpError",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale_loss",
    "state_dict",
]
