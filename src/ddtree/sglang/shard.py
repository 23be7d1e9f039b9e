"""The target's output head as this tensor-parallel rank holds it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from ddtree.tree import TopTokens, merge_top_tokens, top_tokens


class VocabularyShard:
    """Draft logits and top tokens without gathering the vocabulary.

    Each rank searches its own rows of the head; only the best tokens, their costs and one sum per
    position travel, and every rank merges the same numbers to the same result.

    Args:
        head: the target's `lm_head`.
        vocab: tokens of the vocabulary, padding not counted.
    Raises:
        ValueError: the head is quantised, or held in a way that is not by vocabulary rows.
    """

    def __init__(self, head: Any, vocab: int) -> None:
        self._head = unwrap_lora_layer(head)
        if not is_dense_head_weight(getattr(self._head, "weight", None)):
            raise ValueError(
                "DDTREE drafts through the target's output head, and this target's is quantised; "
                "serve a checkpoint whose lm_head is not."
            )
        self._group = get_parallel().tp_group
        self._ranks = int(self._group.world_size)
        self._first, self._held = 0, vocab
        shard = getattr(self._head, "shard_indices", None)
        if shard is not None:
            self._first = int(shard.org_vocab_start_index)
            self._held = min(vocab, int(shard.org_vocab_end_index)) - self._first
        elif self._ranks > 1:
            raise ValueError(
                f"DDTREE cannot tell which vocabulary rows of {type(self._head).__name__} each of "
                f"{self._ranks} ranks holds; set --tp-size to 1."
            )

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V'] of draft hidden states [rows, H]; padding has -inf."""
        logits = self._head.quant_method.apply(self._head, hidden.to(self._head.weight.dtype))
        if self._ranks == 1:
            return logits[:, : self._held]
        # Ranks hold equally many rows, so that what they exchange has one shape.
        logits[:, self._held :] = float("-inf")
        return logits

    def top_tokens(self, logits: torch.Tensor, budget: int) -> TopTokens:
        """What a tree of `budget` nodes needs of [B, L, V'] logits, the same on every rank."""
        logits = logits[:, :budget]
        top = top_tokens(logits, min(budget, logits.shape[2]))
        if self._ranks == 1:
            return top
        return merge_top_tokens(self._gather(top), min(budget, top.tokens.shape[2] * self._ranks))

    def _gather(self, top: TopTokens) -> TopTokens:
        """All ranks' top tokens in one exchange: [rank, B, L, 2 k + 1] int32."""
        tokens = (top.tokens + self._first).to(torch.int32)
        numbers = (top.costs.view(torch.int32), top.totals[..., None].view(torch.int32))
        mine = torch.cat((tokens, *numbers), dim=-1)
        everyone = self._group.all_gather(mine, dim=0).view(self._ranks, *mine.shape)
        k = tokens.shape[-1]
        tokens, costs, totals = everyone.split((k, k, 1), dim=-1)
        return TopTokens(
            costs.contiguous().view(torch.float32),
            tokens.to(torch.int64),
            totals.contiguous().view(torch.float32)[..., 0],
        )
