"""Colossal-AI's ``nn``: learning-rate schedules and metrics, and torch's losses under the names that scripts import."""

from torch.nn import CrossEntropyLoss, MSELoss

from ...apex.optimizers import FusedAdam, FusedSGD
from ...missing import missing
from . import lr_scheduler, metric
from .lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepLR,
    MultiStepWarmupLR,
    PolynomialLR,
    PolynomialWarmupLR,
)
from .metric import Accuracy

__all__ = [
    "Accuracy",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "CrossEntropyLoss",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "FusedAdam",
    "FusedSGD",
    "LinearWarmupLR",
    "MSELoss",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "lr_scheduler",
    "metric",
]

PLAN = "use torch.nn's layer; initialize(..., plan={...}) shards it"
LARGE_BATCH = "torch does not have it; use torch.optim.AdamW"
OFFLOAD = "use torch.optim.AdamW; nothing is offloaded to the CPU here"

__getattr__ = missing(
    __name__,
    dict.fromkeys(("Classifier", "Dropout", "Embedding", "LayerNorm", "Linear", "PatchEmbedding"), PLAN)
    | dict.fromkeys(("FusedLAMB", "Lamb", "Lars"), LARGE_BATCH)
    | dict.fromkeys(("CPUAdam", "HybridAdam"), OFFLOAD),
)
