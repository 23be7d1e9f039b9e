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


# Share of the context's energy that is the same for every token; a fixed direction is what
# attention by position needs, and too much of it hides the tokens.
_CONSTANT_SHARE = 0.3
# Strength of the position pattern in keys and queries, in standard deviations of the rest.
_KEY_PATTERN, _QUERY_PATTERN, _QUERY_GAIN = 1.5, 2.0, 2.0


@torch.no_grad()
def start_from_statistics(
    model: DFlashDraftModel, features: Tensor, embedding: Tensor, roots: Tensor
) -> None:
    """Give the context projection and the attention a start that fits the target's statistics.

    Hidden states of a language model share a large common vector and grow by an order of
    magnitude from early to late layers: through a random projection most of the context is one
    constant and early layers are inaudible. Here each layer's features are freed of their common
    vector and standardised, and a known constant is put back. Queries and keys then share a
    pattern of rotary pairs along that constant, so that attention begins on the latest tokens
    and on the root instead of everywhere.

    Args:
        features: [N, K * H] a sample of context features, N in the thousands.
        embedding: [V, H] the target's; roots: int64 [R] a sample of root tokens.
    """
    hidden = model.config.hidden_size
    constant = torch.randn(hidden)
    constant /= constant.norm()
    parts = features.float().view(len(features), -1, hidden)
    layers = [
        _standardised(parts[:, i], last=i == parts.shape[1] - 1) for i in range(parts.shape[1])
    ]
    weight = torch.cat(layers, dim=1)
    states = features.float() @ weight.t()
    weight *= ((1 - _CONSTANT_SHARE) / states.pow(2).mean()).sqrt()
    mean = parts[:, -1].mean(0)
    gain = (_CONSTANT_SHARE * hidden) ** 0.5 / mean.dot(mean)
    weight[:, -hidden:] += gain * torch.outer(constant, mean)
    model.fc.weight.copy_(weight)

    mask = _unit_rms(embedding[model.config.mask_token_id].float())
    root = _unit_rms(embedding[roots].float()).mean(0)
    root = root - mask * root.dot(mask) / mask.dot(mask)
    constant = constant - mask * constant.dot(mask) / mask.dot(mask)
    recent = constant / (_CONSTANT_SHARE * hidden) ** 0.5 + root / root.dot(root)
    for layer in model.draft_layers:
        _attend_to_recent(layer, recent, mask / mask.dot(mask))
    # First logits of unit spread: close to uniform instead of confidently wrong.
    model.norm.weight.fill_(1 / embedding.float().norm(dim=1).mean())


def _standardised(features: Tensor, *, last: bool) -> Tensor:
    """A map [H, H] that removes the common vector, evens out the channels and mixes them.

    The last layer keeps its channels, the basis that copied layers know.
    """
    mean = features.mean(0)
    mean = mean / mean.norm()
    rest = features - torch.outer(features @ mean, mean)
    scale = 1 / rest.std(0).clamp(min=1e-6)
    free = scale[:, None] * (torch.eye(len(mean)) - torch.outer(mean, mean))
    if last:
        return free
    mixing = torch.empty_like(free)
    torch.nn.init.orthogonal_(mixing)
    return mixing @ free


def _attend_to_recent(layer: DraftLayer, recent: Tensor, mask: Tensor) -> None:
    attention = layer.self_attn
    dim = attention.head_dim
    pattern = torch.cat((torch.ones(dim // 2), torch.zeros(dim // 2)))
    keys = _unit_output(attention.k_proj.weight)
    keys += _KEY_PATTERN * torch.outer(pattern.repeat(len(keys) // dim), recent)
    attention.k_proj.weight.copy_(keys)
    queries = _unit_output(attention.q_proj.weight)
    heads, groups = len(queries) // dim, len(queries) // len(keys)
    # Of the heads that share keys, some look at the latest tokens, others are left free.
    strength = torch.linspace(1, 0, groups).repeat(heads // groups)
    queries += _QUERY_PATTERN * torch.outer(torch.outer(strength, pattern).flatten(), mask)
    attention.q_proj.weight.copy_(queries)
    attention.q_norm.weight.fill_(_QUERY_GAIN)


def _unit_output(weight: Tensor) -> Tensor:
    """Scaled so that inputs of unit variance give outputs of unit variance."""
    return weight / (weight.pow(2).sum(1).mean()).sqrt()


def _unit_rms(vectors: Tensor) -> Tensor:
    return vectors / vectors.pow(2).mean(-1, keepdim=True).sqrt()
