"""Where a drafter starts from: random, or the target's own decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafter import DFlashDraftModel, DrafterError
from ddtree.drafter.model import DraftLayer


@torch.no_grad()
def copy_target_layers(model: DFlashDraftModel, target: Any, layers: Sequence[int]) -> None:
    """Start the drafter's layers from decoder layers of the target, and its norm from the last.

    A target layer scales its input per channel before projecting it to K/V; the drafter's
    context skips that scale. It is folded into the projections, so that context and block agree.

    Args:
        layers: one target layer for each layer of the drafter.
    Raises:
        DrafterError: a layer the target lacks, or other widths.
    """
    decoder = target.get_decoder()
    for ours, index in zip(model.draft_layers, layers, strict=True):
        if not 0 <= index < len(decoder.layers):
            raise DrafterError(
                f"copy_layers names layer {index}; the target has 0 to {len(decoder.layers) - 1}"
            )
        theirs = decoder.layers[index]
        _copy_attention(ours, theirs)
        scale = theirs.post_attention_layernorm.weight
        ours.mlp.gate_proj.weight.copy_(
            _checked(theirs.mlp.gate_proj.weight * scale, ours.mlp.gate_proj)
        )
        ours.mlp.up_proj.weight.copy_(_checked(theirs.mlp.up_proj.weight * scale, ours.mlp.up_proj))
        ours.mlp.down_proj.weight.copy_(_checked(theirs.mlp.down_proj.weight, ours.mlp.down_proj))
    model.norm.weight.copy_(decoder.norm.weight)


def _copy_attention(ours: DraftLayer, theirs: Any) -> None:
    scale = theirs.input_layernorm.weight
    mine, source = ours.self_attn, theirs.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        into = getattr(mine, name)
        into.weight.copy_(_checked(getattr(source, name).weight * scale, into))
    mine.o_proj.weight.copy_(_checked(source.o_proj.weight, mine.o_proj))


def _checked(weight: Tensor, into: nn.Linear) -> Tensor:
    if weight.shape != into.weight.shape:
        raise DrafterError(
            f"a target weight of {list(weight.shape)} does not fit the drafter's "
            f"{list(into.weight.shape)}; start at random instead (copy_layers = [])"
        )
    return weight
