"""A training script for NVIDIA Apex, ported by changing one import. It runs as one process, on a GPU or a CPU:

    python examples/apex_migration.py [O0|O1|O2|O3]

It has two losses with separate loss scales, one optimizer, clipping and a checkpoint, as in Apex's documentation.
"""

import io
import sys

import torch
import torch.nn.functional as F
from torch import nn

from paramp.compat.apex import amp

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
level = sys.argv[1] if len(sys.argv) > 1 else "O2"
body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(body.parameters(), lr=3e-3, eps=1e-4)
body, optimizer = amp.initialize(body, optimizer, opt_level=level, num_losses=2)

saved = io.BytesIO()
for step in range(1, 101):
    x = torch.randn(64, 8, device=device)
    optimizer.zero_grad()
    with amp.scale_loss(F.mse_loss(body(x), x[:, :4] * x[:, 4:]), optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(1e-2 * body(-x).square().mean(), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    if step == 50:
        checkpoint = {"model": body.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        torch.save(checkpoint, saved)
    if step % 25 == 0:
        with torch.no_grad():
            error = F.mse_loss(body(x), x[:, :4] * x[:, 4:])
        scales = [f"{scaler['loss_scale']:g}" for scaler in amp.state_dict().values()]
        print(f"step {step}: loss {error.item():.4f}, scales {', '.join(scales)}")

saved.seek(0)
checkpoint = torch.load(saved)  # as after a restart: initialize first, then load
body.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
