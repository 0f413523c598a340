"""What is trained with the same bits on every layout: models, their batches, optimizers and losses."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mixtures as transformers_mixtures
import pretrained
import torch
from torch import nn
from torch.nn import functional as F

import paramp
from paramp.models import GPT, GPTConfig, MoEGPT, MoEGPTConfig, ViT, ViTConfig

VOCAB = 100
LENGTH = 16


def gpt(num_heads: int = 4, **changes: Any) -> nn.Module:
    """Tied embeddings, dropout, gradients of norms and biases that are not small."""
    sizes = {"num_layers": 4, "width": 64, "max_seq_len": LENGTH, "vocab_size": VOCAB, "init_std": 0.06}
    return GPT(GPTConfig(num_heads=num_heads, **{"dropout": 0.1, **sizes, **changes}))


def mixtures(**changes: Any) -> nn.Module:
    """A GPT of mixtures; so many experts that some of a rank's, or all, get no token of a sample."""
    sizes = {"num_layers": 2, "num_heads": 4, "width": 32, "max_seq_len": LENGTH, "vocab_size": VOCAB, "init_std": 0.06}
    sizes |= {"num_experts": 8, "expert_width": 24, "dropout": 0.1, "bias_rate": 2.0**-7}
    return MoEGPT(MoEGPTConfig(**sizes | changes))


def short_inputs(call: int, length: int = 4) -> Any:
    """The global batch of a call for a mixture of transformers: tokens."""
    drawn = torch.randint(3, 60, (4, length + 1), generator=torch.Generator().manual_seed(call))
    return {"input_ids": drawn[:, :-1]}, drawn[:, 1:]


def tokens(size: int = 4, length: int = LENGTH) -> Callable[[int], Any]:
    """The global batch of a call: tokens, and the ones that follow them."""

    def batch(call: int) -> Any:
        drawn = torch.randint(0, VOCAB, (size, length + 1), generator=torch.Generator().manual_seed(call))
        return drawn[:, :-1], drawn[:, 1:]

    return batch


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.1}]
    for parameter in model.parameters():
        groups[parameter.ndim > 1]["params"].append(parameter)
    return torch.optim.AdamW(groups[::-1], lr=3e-3)


def labelled(call: int) -> Any:
    """The global batch of a call, for a model that computes its own loss."""
    drawn, _ = tokens()(call)
    labels = drawn.masked_fill(torch.rand(drawn.shape, generator=torch.Generator().manual_seed(call)) < 0.3, -100)
    return ({"input_ids": drawn, "labels": labels},)


def padded(call: int) -> Any:
    """As :func:`labelled`, of 13 tokens, with padding on the left of the first sample and on the right of others."""
    (batch,) = labelled(call)
    batch = {name: value[:, :13] for name, value in batch.items()}
    lengths = torch.tensor([9, 13, 6, 2]).roll(call)[:, None]
    seen = torch.arange(13) < lengths
    seen[0] = seen[0].flip(0)
    return ({**batch, "labels": batch["labels"].masked_fill(~seen, -100), "attention_mask": seen.long()},)


def of_60_tokens(batch: Callable[[int], Any]) -> Callable[[int], Any]:
    """As ``batch``, :func:`labelled` or :func:`padded`, for a mixture of transformers."""

    def fewer(call: int) -> Any:
        (found,) = batch(call)
        return ({**found, "input_ids": found["input_ids"] % 60, "labels": found["labels"].clamp(max=59)},)

    return fewer


def packed(call: int) -> Any:
    """As :func:`labelled`, each sample of two or three documents."""
    (batch,) = labelled(call)
    positions = torch.arange(LENGTH).repeat(4, 1)
    positions[:, 7:] -= 7
    positions[call % 4, 12:] -= 5
    return ({**batch, "position_ids": positions},)


def limited(call: int) -> Any:
    """As :func:`packed`, with documents as flash attention takes them."""
    (batch,) = labelled(call)
    limits = paramp.whole(torch.tensor([0, 5, 12, LENGTH], dtype=torch.int32))
    positions = torch.cat([torch.arange(size) for size in (5, 7, 4)]).repeat(4, 1)
    return ({**batch, "position_ids": positions, "cu_seq_lens_q": limits, "cu_seq_lens_k": limits},)


def lora() -> nn.Module:
    """A Llama whose adapters are trained, with dropout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        import peft

        targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        options = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(pretrained.build("Llama"), options)


def output_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return next_token(output.logits, targets)


def convolutional() -> nn.Module:
    """Images (batch, 3, 8, 8) to logits (batch, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10))


def images(call: int) -> Any:
    """The global batch of a call: images (4, 3, 8, 8) and classes."""
    generator = torch.Generator().manual_seed(call)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def vit(**changes: Any) -> nn.Module:
    sizes = {"num_layers": 4, "num_heads": 4, "width": 64, "image_size": 8, "patch_size": 2, "num_classes": 12}
    return ViT(ViTConfig(**{"dropout": 0.1, "init_std": 0.1, **sizes, **changes}))


class Residual(nn.Module):
    """A block of one's own; ``kind`` names what is special in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.dropout = (nn.RMSNorm if kind == "RMSNorm" else nn.LayerNorm)(32), nn.Dropout(0.1)
        self.up, self.down, self.inner = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 32)
        self.other = self.inner if kind == "shared module" else nn.Linear(32, 32)
        if kind == "shared parameter":
            self.other.weight = self.inner.weight
        for module in (self.up, self.norm, self.other) if kind == "frozen" else ():
            module.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "changing buffer":
            self.seen += 1
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        x = x + torch.tanh(self.inner(x))
        if self.kind == "called twice":
            x = x + torch.tanh(self.inner(x))
        return x if self.kind == "unused" else x + torch.sigmoid(self.other(x))


def own(kind: str) -> nn.Module:
    """Tokens to logits."""
    blocks = (Residual(kind) for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, VOCAB))


class Uneven(nn.Module):
    """Tokens to logits. No dim divides by 2; some parameters have one row, no gradient at all, or not always."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB + 1, 15)
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Linear(15, 7)
        self.blocks = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))
        self.frozen, self.sometimes = nn.Linear(15, 15).requires_grad_(False), nn.Linear(15, 15)
        self.head = nn.Linear(15, VOCAB + 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) * self.scale
        for block in (*self.blocks, self.frozen):
            x = x + torch.tanh(block(x))
        if int(tokens[0, 0]) % 16 == 0:
            x = x + torch.tanh(self.sometimes(x))
        return self.head(x)


OWN_PLAN = {"0": "vocab", "*.up": "colwise", "*.down": "rowwise", "6": "vocab_logits"}


def counted(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens that are not ignored, and their number, which differs from sample to sample."""
    targets = targets.masked_fill(targets < 40, -100)
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, (targets != -100).sum()


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def look_around(engine: Any, batch: Any) -> None:
    """What may be done between the calls of a window, and changes nothing."""
    engine.zero_grad()  # drops nothing in a window
    engine.evaluate(*batch)
    engine.gradient_histogram()


def look_behind(engine: Any, batch: Any) -> None:
    """What may be done after a step, and changes nothing."""
    engine.zero_grad()
    engine.evaluate(*batch)
    assert engine.check_replicas() == []
    if engine.num_skipped_in_a_row:
        engine.diagnose_overflow()
    engine.eval()
    engine(batch[0])
    engine.train()


@dataclass(frozen=True)
class Task:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any] = field(default_factory=tokens)
    """From the number of a call of forward_backward to its arguments for the global batch."""
    criterion: Callable[..., Any] | None = next_token
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups
    calls: int = 2
    """Calls of a window."""
    flushed: bool = False
    """Whether each window is ended by flush() one call early."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the configuration."""
    plan: Any = None
    between: Callable[[Any, Any], None] | None = None
    """What is done with the engine and this rank's batch behind each call but the last of a window."""
    behind: Callable[[Any, Any], None] | None = None
    """And behind each step."""
    scales: Mapping[str, float] = field(default_factory=lambda: {"16-mixed": 2.0**23, "16-naive": 2.0**20})
    """Mode -> the scale to begin with, so that the first steps overflow: three of a GPT, two of a small one."""


LLAMA = partial(
    pretrained.build, "Llama", num_attention_heads=8, num_key_value_heads=4
)  # four tensor ranks divide both
GEMMA2 = partial(
    pretrained.build,
    "Gemma2",
    attn_logit_softcapping=0.5,
    final_logit_softcapping=None,  # a function of logits, which tensor ranks have shards of
    attn_implementation="eager",
)
GPT2_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1)
SMALL = partial(gpt, num_layers=2, width=32)
SMALL_SCALES = {"16-mixed": 2.0**21, "16-naive": 2.0**18}
KINDS = ("plain", "unused", "frozen", "shared module", "shared parameter", "called twice", "changing buffer", "RMSNorm")
TRANSFORMERS_MIXTURES: tuple[tuple[str, str, Any], ...] = (
    ("Mixtral", "grouped_mm", None),
    ("Qwen3-MoE", "eager", {}),
    ("DeepSeek-V3", "batched_mm", None),
    ("GPT-OSS", "eager", None),
    ("OLMoE", "grouped_mm", None),
)
"""Each with how its experts compute, and a plan."""
CUT = {"chunk": 1, "slices": 4, "sequence_slices": 8}
LONG = {
    "gpt": Task(SMALL, scales=SMALL_SCALES),
    "gpt, counted": Task(SMALL, criterion=counted, scales=SMALL_SCALES),
    "gpt, checkpointed": Task(SMALL, scales=SMALL_SCALES, config={"activation_checkpointing": "full"}),
    "gpt, chunks of 2": Task(SMALL, tokens(8), scales=SMALL_SCALES, config={"reproducible": {**CUT, "chunk": 2}}),
    "llama": Task(LLAMA, criterion=output_loss, calls=1),
    "llama, own loss": Task(LLAMA, labelled, None, calls=1),
    "llama, dropout, own loss": Task(partial(LLAMA, attention_dropout=0.1), labelled, None, calls=1),
    "llama, tied": Task(partial(LLAMA, tie_word_embeddings=True), criterion=output_loss, calls=1),
    "llama, padded": Task(LLAMA, padded, None, calls=1),
    "llama, packed": Task(LLAMA, packed, None, calls=1),
    "llama, documents": Task(LLAMA, limited, None, calls=1),
    "gemma2, padded": Task(GEMMA2, padded, None, calls=1, plan={}),
    "own, called twice": Task(partial(own, "called twice"), plan=OWN_PLAN, calls=1),
}
"""Those whose sequences are cut; each is also of whole ones in slices."""
LONG_MIXTURES = {
    "mixtures": Task(mixtures, criterion=MoEGPT.loss, scales=SMALL_SCALES),
    "mixtures, checkpointed": Task(
        mixtures, criterion=MoEGPT.loss, scales=SMALL_SCALES, config={"activation_checkpointing": "full"}
    ),
    "mixtures, chunks of 2": Task(
        mixtures, tokens(8), MoEGPT.loss, scales=SMALL_SCALES, config={"reproducible": {**CUT, "chunk": 2}}
    ),
    **{
        name: Task(
            partial(transformers_mixtures.build, name, backend, 4),
            partial(short_inputs, length=LENGTH),
            output_loss,
            calls=1,
            plan=plan,
        )
        for name, backend, plan in TRANSFORMERS_MIXTURES
        if name != "GPT-OSS"  # has sinks
    },
    "Mixtral, padded": Task(
        partial(transformers_mixtures.build, "Mixtral", "grouped_mm", 4), of_60_tokens(padded), None, calls=1
    ),
}
"""Those of experts."""
TASKS = {
    "gpt": Task(gpt),
    "small gpt": Task(SMALL, calls=1, scales=SMALL_SCALES),
    "small gpt of 4 layers": Task(partial(gpt, width=32), calls=1, scales=SMALL_SCALES),
    "small gpt, counted": Task(SMALL, criterion=counted, scales=SMALL_SCALES),
    "mixtures": Task(mixtures, tokens(4, 4), MoEGPT.loss, scales=SMALL_SCALES),
    "mixtures of 4 layers": Task(partial(mixtures, num_layers=4), tokens(4, 4), MoEGPT.loss, scales=SMALL_SCALES),
    "mixtures, checkpointed": Task(
        mixtures, tokens(4, 4), MoEGPT.loss, scales=SMALL_SCALES, config={"activation_checkpointing": "full"}
    ),
    **{
        name: Task(
            partial(transformers_mixtures.build, name, backend, 4), short_inputs, output_loss, calls=1, plan=plan
        )
        for name, backend, plan in TRANSFORMERS_MIXTURES
    },
    **{
        f"sequences: {name}": replace(task, config={"reproducible": CUT, **task.config})
        for name, task in (LONG | LONG_MIXTURES).items()
    },
    "gpt of 8 slices": Task(partial(gpt, 8, num_layers=2), calls=1, config={"reproducible": {"chunk": 1, "slices": 8}}),
    "gpt, chunks of 2": Task(gpt, tokens(8), config={"reproducible": {"chunk": 2, "slices": 4}}),
    "gpt, counted": Task(gpt, criterion=counted),
    "gpt, smoothed": Task(gpt, criterion=smoothed),
    "gpt, averaged": Task(gpt, config={"ema": {"decay": 0.5}}),
    "gpt, flushed": Task(gpt, calls=3, flushed=True),
    "gpt, looked at": Task(gpt, between=look_around, behind=look_behind),
    "gpt, checkpointed": Task(gpt, config={"activation_checkpointing": "full"}),
    "gpt, every second checkpointed": Task(gpt, config={"activation_checkpointing": 2}),
    "gpt, untied": Task(partial(gpt, tied=False)),
    "sgd": Task(gpt, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
    "adam": Task(gpt, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.1)),
    "llama": Task(LLAMA, criterion=output_loss, calls=1),
    "llama, own loss": Task(LLAMA, labelled, None, calls=1),
    "llama, dropout": Task(partial(LLAMA, attention_dropout=0.1), criterion=output_loss, calls=1),
    "llama, dropout, own loss": Task(partial(LLAMA, attention_dropout=0.1), labelled, None, calls=1),
    "llama, tied": Task(partial(LLAMA, tie_word_embeddings=True), criterion=output_loss, calls=1),
    "gpt2": Task(partial(pretrained.build, "GPT-2", **GPT2_DROPOUT), criterion=output_loss, calls=1),
    "lora": Task(lora, criterion=output_loss, calls=1),
    "uneven": Task(Uneven),
    "convolutional, no plan": Task(convolutional, images, F.cross_entropy, calls=1),
    "convolutional": Task(convolutional, images, F.cross_entropy, calls=1, plan={"15": "rowwise_scatter"}),
    "vit": Task(vit, images, F.cross_entropy, calls=1),
    "vit without class token": Task(partial(vit, class_token=False), images, F.cross_entropy, calls=1),
    **{f"own, {kind}": Task(partial(own, kind), plan=OWN_PLAN, calls=1) for kind in KINDS},
}
