"""paramp inside trainers that bring their own loop.

For users: ``accelerate``, ``transformers``, ``lightning``, ``fabric`` and ``torchtitan``. What they share:
``shared_grad_scaler``, one loss scale for several optimizers; ``gradient_for_torch_clipping``;
``masters_for_users_optimizers``, fp32 masters; ``lightning_precision``, the base of both Lightning plugins.
"""
