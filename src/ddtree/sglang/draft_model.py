"""Adjustments to SGLang's DFlash draft model that hold on every device."""

from __future__ import annotations

from typing import Any

import torch


def keep_embedding_dtype(model: Any) -> None:
    """Feed a DFlash draft model its block embeddings in its own dtype; idempotent.

    `ModelRunner` casts every `input_embeds` to bfloat16 before it calls `model.forward`. The batch
    still holds the embeddings as the target's table gave them, so the float32 drafter reads those
    instead of a rounded copy.
    """
    dtype = next(model.parameters()).dtype
    if dtype == torch.bfloat16 or getattr(model, "_keeps_embedding_dtype", False):
        return
    forward = model.forward

    def forward_with_own_dtype(
        input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("input_embeds") is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(dtype)
        return forward(input_ids, positions, forward_batch, **kwargs)

    model.forward = forward_with_own_dtype
    model._keeps_embedding_dtype = True
