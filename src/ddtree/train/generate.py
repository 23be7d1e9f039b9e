"""Batched generation by the target, with the features it computes on the way.

Generation is the bottleneck of preparing data, so nothing is done twice: prompts of similar length
share a batch, keys and values are written once into preallocated memory, the query heads that share
a K/V head are folded into the query length instead of expanding K/V, rows that have finished are
dropped, and the hidden states of each step are kept as features.
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
    """Keys and values [B, Hkv, capacity, D] per layer, for transformers' attention layers.

    A forward over some of the rows is a prefill: it reads what it brings itself and nothing else.
    """

    is_compileable = False

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.length = 0  # where the next forward writes
        self.rows: Tensor | None = None  # the rows of a prefill; all rows decode when None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args, **_kwargs):
        """Write [B, Hkv, L, D] from `length` on; the keys and values to attend to."""
        stored = self._layers.get(layer_idx)
        if stored is None:
            # Zeros: a row's padding is masked, and a mask does not stop a NaN.
            shape = (self.batch, keys.shape[1], self.capacity, keys.shape[3])
            stored = self._layers[layer_idx] = keys.new_zeros(shape), values.new_zeros(shape)
        end = self.length + keys.shape[2]
        rows = slice(None) if self.rows is None else self.rows
        for memory, new in zip(stored, (keys, values), strict=True):
            memory[rows, :, self.length : end] = new
        if self.rows is not None:
            return keys, values
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def get_seq_length(self, *_args) -> int:
        """Where the next forward writes."""
        return self.length

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all but the given rows."""
        self.batch = len(rows)
        self._layers = {i: (k[rows], v[rows]) for i, (k, v) in self._layers.items()}


def folded_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention for transformers' interface: grouped K/V stay as they are.

    query [B, Hq, L, D]; key, value [B, Hkv, S, D]; attention_mask additive [B, 1, 1, S] or None;
    returns [B, L, Hq, D]. More than one query is a prefill without padding.

    Raises:
        GenerationError: attention sinks, or a sliding window shorter than the keys.
    """
    window = kwargs.get("sliding_window")
    if kwargs.get("s_aux") is not None or (window is not None and key.shape[2] > window):
        raise GenerationError(
            "batched generation attends to all earlier tokens, and this target has "
            f"{'attention sinks' if window is None else f'a sliding window of {window} tokens'}; "
            "generate its responses with a server and pass them with --responses"
        )
    size, shared = query.shape[2], key.shape[1]
    if size > 1:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    folded = fold_queries(query.transpose(1, 2), shared)
    out = F.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
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
    """Continue prompts, the longest first; yields each response when it is finished.

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
        for group in length_groups(prompts, batch_size):
            rows = [torch.tensor(list(prompts[i])) for i in group]
            rooms = [min(max_new_tokens, limit - len(row)) for row in rows]
            state = _Decoding(target, rows, group, rooms, layer_ids)
            yield from state.run(set(eos_token_ids), rule or SamplingRule(), generator)


def length_groups(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Indices of at most `batch_size` prompts of similar length each, the longest first."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


class _Decoding:
    """Rows that still grow, with the target's cache.

    Prompts end in one column and shorter ones start later: tokens [B, columns], and features and
    cache alike. A row's positions count from its own start.
    """

    def __init__(
        self,
        target: Any,
        prompts: Sequence[Tensor],
        indices: Sequence[int],
        rooms: Sequence[int],
        layer_ids: Sequence[int],
    ) -> None:
        self.target, self.layer_ids = target, list(layer_ids)
        embedding = target.get_input_embeddings().weight
        self.device, self.indices = embedding.device, torch.tensor(list(indices))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.prompt_end = int(lengths.max())
        self.starts = self.prompt_end - lengths  # [B] first column of each row
        self.ends = self.prompt_end + torch.tensor(list(rooms))  # [B] columns it may fill
        columns = int(self.ends.max())
        self.tokens = torch.zeros(len(prompts), columns, dtype=torch.int64)
        for row, (prompt, start) in enumerate(zip(prompts, self.starts.tolist(), strict=True)):
            self.tokens[row, start : self.prompt_end] = prompt
        self.tokens = self.tokens.to(self.device)
        self.mask = _padding_mask(self.starts, columns).to(self.device, embedding.dtype)
        shape = (len(prompts), columns, len(self.layer_ids) * embedding.shape[1])
        self.features = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self.cache = FixedCache(len(prompts), columns)
        self.done = torch.zeros(len(prompts), dtype=torch.bool)

    def run(self, eos: set[int], rule: SamplingRule, generator) -> Iterator[Continuation]:
        """Every row once, when an end token or its room ends it."""
        stop = torch.tensor(sorted(eos), device=self.device)
        logits = self._prefill()
        for end in range(self.prompt_end, self.tokens.shape[1]):
            chosen = choose_tokens(logits, rule, generator)
            self.tokens[:, end] = chosen
            finished = (torch.isin(chosen, stop).cpu() | (self.ends == end + 1)) & ~self.done
            for row in finished.nonzero()[:, 0].tolist():
                yield self._row(row, end + 1)
            self.done |= finished
            if self.done.all():
                return
            if self.done.float().mean() >= _COMPACT_SHARE:
                self._compact()
            logits = self._forward(end, end + 1)

    def _prefill(self) -> Tensor:
        """Logits [B, V] after the prompts; those of one length share a forward."""
        found = []
        for start in self.starts.unique().tolist():
            rows = (self.starts == start).nonzero()[:, 0]
            found.append((rows, self._forward(start, self.prompt_end, rows)))
        order = torch.cat([rows for rows, _ in found]).argsort()
        return torch.cat([logits for _, logits in found])[order.to(self.device)]

    def _forward(self, start: int, end: int, rows: Tensor | None = None) -> Tensor:
        """One forward over columns; `rows` begin there, all rows go on from there when None."""
        columns = torch.arange(start, end)
        chosen = slice(None) if rows is None else rows
        self.cache.rows, self.cache.length = rows, start
        # Without padding the target reads no mask at all.
        masked = rows is None and bool(self.starts.any())
        out = self.target.get_decoder()(
            self.tokens[chosen, start:end],
            attention_mask=self.mask[..., :end] if masked else None,
            position_ids=(columns - self.starts[chosen, None]).to(self.device),
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(self.layer_ids),
        )
        if self.layer_ids:
            states = [out.hidden_states[i + 1] for i in self.layer_ids]
            self.features[chosen, start:end] = torch.cat(states, dim=-1).bfloat16()
        return self.target.get_output_embeddings()(out.last_hidden_state[:, -1])

    def _row(self, row: int, end: int) -> Continuation:
        start = int(self.starts[row])
        return Continuation(
            int(self.indices[row]),
            self.tokens[row, start:end].cpu().clone(),
            self.prompt_end - start,
            self.features[row, start : end - 1].cpu().clone(),
        )

    def _compact(self) -> None:
        rows = (~self.done).nonzero()[:, 0]
        self.indices, self.done = self.indices[rows], self.done[rows]
        self.starts, self.ends = self.starts[rows], self.ends[rows]
        rows = rows.to(self.device)
        self.tokens, self.features = self.tokens[rows], self.features[rows]
        self.mask = self.mask[rows]
        self.cache.keep_rows(rows)


def _padding_mask(starts: Tensor, columns: int) -> Tensor:
    """Additive mask [B, 1, 1, columns] that hides the columns before each row's start."""
    hidden = torch.arange(columns) < starts[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
