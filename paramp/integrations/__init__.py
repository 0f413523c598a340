"""paramp inside trainers that bring their own loop.

For users: ``accelerate``, ``transformers``, ``lightning``, ``fabric`` and ``torchtitan``. What they share:
``multi_optimizer_scaler``, one loss scale for several optimizers; ``gradient_for_torch_clipping``;
``masters_for_users_optimizers``, fp32 masters; ``lightning_plugin_base``, the base of both Lightning plugins.
"""
