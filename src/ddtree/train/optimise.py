"""Optimisers and the learning rate of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ddtree.train.settings import TrainSettings


def build_optimisers(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest.

    Muon's update is scaled to AdamW's usual size, so one learning rate serves both.
    """
    decay, lr = settings.weight_decay, settings.lr
    matrices: list[nn.Parameter] = []
    if settings.optimiser == "muon":
        matrices = [
            p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim > 1
        ]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(decay_groups(rest, decay), lr=lr, betas=(0.9, settings.beta2), fused=True)
    ]
    if matrices:
        optimisers.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimisers


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases."""
    kept = list(parameters)
    return [
        {"params": [p for p in kept if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in kept if p.ndim <= 1], "weight_decay": 0.0},
    ]


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, then cosine to `final_lr` times the peak."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.lr * (step + 1) / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    floor = settings.final_lr
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1, progress))))


def set_lr(optimisers: Sequence[Any], lr: float) -> None:
    """Set every group's learning rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = lr
