"""The script that docs/tutorial.md ends with: torchrun --standalone --nproc-per-node 4 examples/tutorial.py 2 2."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tutorial_model import Transformer, counting

import paramp

FOLDER = "runs/tutorial"
tensor, pipeline = map(int, sys.argv[1:] or (2, 2))
parallel = {"tensor": tensor, "pipeline": {"size": pipeline, "microbatches": 4}}
config = {"parallel": parallel, "precision": "16-mixed", "clip_grad_norm": 1.0, "gradient_accumulation": 2}
plan = {f"blocks.*.{name}": "colwise" for name in ("attention.query", "attention.key", "attention.value", "up")}
plan |= {"blocks.*.attention.out": "rowwise", "blocks.*.down": "rowwise", "tokens": "vocab", "head": "vocab_logits"}


def criterion(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


with paramp.launch_from_torch(config) as context, paramp.StopRequest() as stop:
    model = Transformer()
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loaders = DataLoader(counting(336, seed=0), batch_size=16, shuffle=True), DataLoader(counting(100, seed=1), 32)
    engine, training, held_out, warmup = paramp.initialize(model, optimizer, criterion, *loaders, warmup, plan=plan)
    checkpoints = paramp.Checkpoints(FOLDER, keep_best="min")
    if found := checkpoints.newest():
        engine.load(found)
    step = engine.num_steps if found else None
    with paramp.Metrics(FOLDER, resumed_at=step, enabled=context.is_main) as metrics:
        for epoch in range(training.epoch, 4):
            for x, y in training:
                engine.forward_backward(x, y, return_loss=False)
                result = engine.step()
                warmup.step()
                engine.zero_grad()
                if result.stepped or result.overflow:  # not while gradients accumulate
                    metrics.write(engine.num_steps, loss=result.loss, loss_scale=result.loss_scale)
                if stop.agreed(context):  # Ctrl-C, or a signal to any rank
                    engine.flush()
                    checkpoints.save(engine, engine.num_steps, wait=True)
                    sys.exit(128 + (stop.received or 15))
            engine.flush()  # the epoch's last window may have one batch only
            loss = engine.evaluate(held_out).item()
            metrics.write(engine.num_steps, val_loss=loss)
            checkpoints.save(engine, engine.num_steps, metric=loss)
            if context.is_main:
                print(f"epoch {epoch}: {engine.num_steps} steps, {engine.num_skipped} skipped, val_loss {loss:.2f}")
    engine.finish_saving()
    engine.load(checkpoints.best(), weights_only=True)
    weights = engine.state_dict()  # the whole model in fp32, on every rank
    if context.is_main:
        torch.save(weights, f"{FOLDER}/model.pt")
        print(f"all {engine.num_steps} steps are done; weights of {checkpoints.best().name} are in {FOLDER}/model.pt")
