"""Batched generation by the target, with the features it computes on the way.

Generation is the bottleneck of preparing data, so nothing is done twice: prompts of equal length
share a batch without padding, keys and values are written once into preallocated memory, the
query heads that share a K/V head are folded into the query length instead of expanding K/V, rows
that have finished are dropped, and the hidden states of each step are kept as features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.accept import SamplingRule, choose_tokens
from ddtree.drafter.model import fold_queries, unfold_queries

_ATTENTION = "ddtree_folded"
# Rows are copied to drop finished ones only when at least this share has finished.
_COMPACT_SHARE = 0.25


class GenerationError(ValueError):
    """Prompts that cannot be continued."""


@dataclass(frozen=True)
class Continuation:
    """One prompt and its response.

    Attributes:
        index: place of the prompt in what was passed.
        tokens: int64 [T] prompt and response; features: [T - 1, K * H] of all but the last.
        prompt_length: tokens of the prompt.
    """

    index: int
    tokens: Tensor
    prompt_length: int
    features: Tensor


class FixedCache:
    """Keys and values [B, Hkv, capacity, D] per layer, for transformers' attention layers."""

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args, **_kwargs):
        """Write [B, Hkv, L, D] after what is there; views of all keys and values."""
        stored = self._layers.get(layer_idx)
        if stored is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            stored = self._layers[layer_idx] = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        for memory, new in zip(stored, (keys, values), strict=True):
            memory[:, :, self.length : end] = new
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def get_seq_length(self, *_args) -> int:
        """Committed positions."""
        return self.length

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all but the given rows."""
        self._layers = {i: (k[rows], v[rows]) for i, (k, v) in self._layers.items()}


def folded_attention(module, query, key, value, attention_mask, scaling=None, **_kwargs):
    """Attention for transformers' interface: grouped K/V as they are, no padding, no mask.

    query [B, Hq, L, D]; key, value [B, Hkv, S, D]; returns [B, L, Hq, D].
    """
    size, shared = query.shape[2], key.shape[1]
    if size > 1:  # prefill from an empty cache
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    folded = fold_queries(query.transpose(1, 2), shared)
    out = F.scaled_dot_product_attention(folded, key, value, scale=scaling)
    return unfold_queries(out, size).unflatten(2, (query.shape[1], -1)), None


@contextmanager
def _folded(target: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, folded_attention)
    before = target.config._attn_implementation
    target.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        target.set_attn_implementation(before)


@torch.no_grad()
def generate_responses(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    layer_ids: Sequence[int] = (),
    batch_size: int = 96,
    rule: SamplingRule | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Continuation]:
    """Continue prompts, longest batches first; yields each response when it is finished.

    Args:
        prompts: token ids, none empty.
        eos_token_ids: tokens that end a response; they are part of it.
        layer_ids: target layers whose outputs become features; none when empty.
        rule: greedy when None.
    Raises:
        GenerationError: an empty prompt, or one that leaves no room for a token.
    """
    limit = target.config.get_text_config().max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise GenerationError(
                f"prompt {index} has {len(prompt)} tokens; it must have 1 to {limit - 1}"
            )
    with _folded(target):
        for group in equal_length_groups(prompts, batch_size):
            tokens = torch.tensor([list(prompts[i]) for i in group])
            room = min(max_new_tokens, limit - tokens.shape[1])
            state = _Decoding(target, tokens, group, room, layer_ids)
            yield from state.run(set(eos_token_ids), rule or SamplingRule(), generator)


def equal_length_groups(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Indices of prompts of one length each, at most `batch_size`, the fullest groups first."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    groups = [
        members[i : i + batch_size]
        for members in by_length.values()
        for i in range(0, len(members), batch_size)
    ]
    return sorted(groups, key=len, reverse=True)


class _Decoding:
    """Rows that still grow: tokens [B, P + room] and features, with the target's cache."""

    def __init__(self, target, tokens: Tensor, indices: Sequence[int], room: int, layer_ids):
        self.target, self.layer_ids = target, list(layer_ids)
        self.prompt_length, self.room = tokens.shape[1], room
        embedding = target.get_input_embeddings().weight
        self.device = embedding.device
        self.tokens = F.pad(tokens, (0, room)).to(self.device)
        width = len(self.layer_ids) * embedding.shape[1]
        shape = (len(tokens), self.prompt_length + room, width)
        self.features = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self.cache = FixedCache(self.prompt_length + room)
        self.indices = torch.tensor(list(indices))
        self.done = torch.zeros(len(tokens), dtype=torch.bool)

    def run(self, eos: set[int], rule: SamplingRule, generator) -> Iterator[Continuation]:
        stop = torch.tensor(sorted(eos), device=self.device)
        start = 0
        for end in range(self.prompt_length, self.prompt_length + self.room):
            logits = self._forward(start, end)
            chosen = choose_tokens(logits, rule, generator)
            self.tokens[:, end] = chosen
            start = end
            finished = torch.isin(chosen, stop).cpu() & ~self.done
            for row in finished.nonzero()[:, 0].tolist():
                yield self._row(row, end + 1)
            self.done |= finished
            if self.done.all():
                return
            if self.done.float().mean() >= _COMPACT_SHARE:
                self._compact()
        for row in (~self.done).nonzero()[:, 0].tolist():
            yield self._row(row, self.prompt_length + self.room)

    def _forward(self, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=self.device)[None]
        out = self.target.get_decoder()(
            self.tokens[:, start:end],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(self.layer_ids),
        )
        self.cache.length = end
        if self.layer_ids:
            states = [out.hidden_states[i + 1] for i in self.layer_ids]
            self.features[:, start:end] = torch.cat(states, dim=-1)
        return self.target.get_output_embeddings()(out.last_hidden_state[:, -1])

    def _row(self, row: int, end: int) -> Continuation:
        tokens, features = self.tokens[row, :end].cpu(), self.features[row, : end - 1].cpu()
        return Continuation(
            int(self.indices[row]), tokens.clone(), self.prompt_length, features.clone()
        )

    def _compact(self) -> None:
        rows = (~self.done).nonzero()[:, 0]
        self.indices, self.done = self.indices[rows], self.done[rows]
        rows = rows.to(self.device)
        self.tokens, self.features = self.tokens[rows], self.features[rows]
        self.cache.keep_rows(rows)
