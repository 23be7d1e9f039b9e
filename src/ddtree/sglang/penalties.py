"""Frequency, presence and repetition penalties and `min_new_tokens`, exact along every path.

A node's context is the committed output and the drafted tokens on the path to it, so its penalties
must count both. The committed part is kept on the device per request slot, updated where tokens
are committed, and therefore right under overlap scheduling too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ddtree.tree import DraftTree


@dataclass(frozen=True)
class PenaltyRules:
    """What the requests of a batch ask for, on the device."""

    frequency: torch.Tensor  # float32 [B, 1, 1]
    presence: torch.Tensor  # float32 [B, 1, 1]
    repetition: torch.Tensor  # float32 [B, 1, 1]
    min_new_tokens: torch.Tensor  # int64 [B, 1]
    stop_bias: torch.Tensor  # float32 [B, 1, V], -inf at tokens that would stop the request

    @classmethod
    def of(cls, reqs: list[Req], vocab_size: int, device: torch.device | str) -> PenaltyRules:
        params = [req.sampling_params for req in reqs]

        def column(name: str) -> torch.Tensor:
            values = [float(getattr(p, name)) for p in params]
            return torch.tensor(values, device=device)[:, None, None]

        stop_bias = torch.zeros(len(reqs), 1, vocab_size)
        for row, req in enumerate(reqs):
            if req.sampling_params.min_new_tokens > 0:
                stop_bias[row, 0, _stop_tokens(req)] = float("-inf")
        return cls(
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
            repetition=column("repetition_penalty"),
            min_new_tokens=column("min_new_tokens")[:, :, 0].to(torch.int64),
            stop_bias=stop_bias.to(device),
        )


class PathPenalties:
    """Counts of output tokens per request slot, and the penalties at the nodes of a tree."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._shape = (slots, vocab_size)
        self._device = device
        self._counts: torch.Tensor | None = None  # int32 [slots, V], only once somebody asks

    def begin(self, batch: ScheduleBatch, first_tokens: torch.Tensor) -> None:
        """After a prefill: forget the slots' former requests, count the tokens just sampled."""
        if self._counts is None:
            if not _asked(batch.sampling_info):
                return
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        rows = batch.req_pool_indices
        self._counts[rows] = 0
        self._counts[rows, first_tokens.to(torch.int64)] = 1

    def commit(self, batch: ScheduleBatch, tokens: torch.Tensor, commit_lens: torch.Tensor) -> None:
        """Count the first `commit_lens` [B] of `tokens` int64 [B, places]."""
        if self._counts is None:
            return
        places = torch.arange(tokens.shape[1], device=tokens.device)
        kept = (places < commit_lens[:, None]).to(torch.int32)
        rows = batch.req_pool_indices[:, None].expand_as(tokens)
        self._counts.index_put_((rows, tokens), kept, accumulate=True)

    def apply(self, batch: ScheduleBatch, tree: DraftTree, logits: torch.Tensor) -> None:
        """Penalise logits [B * N, V] in place: additive penalties first, then the scaling one."""
        if self._counts is None or not _asked(batch.sampling_info):
            return
        vocab = self._shape[1]
        rules = PenaltyRules.of(batch.reqs, vocab, logits.device)
        committed = self._counts[batch.req_pool_indices].to(torch.float32)
        drafted = tree.visibility()
        drafted[:, :, 0] = False  # the root is committed
        counts = committed[:, None, :].repeat(1, tree.width, 1)
        counts.scatter_add_(
            2, tree.tokens[:, None, :].expand_as(drafted), drafted.to(torch.float32)
        )
        seen = counts > 0
        by_node = logits.view(*tree.tokens.shape, -1)[:, :, :vocab]
        by_node.sub_(rules.frequency * counts + rules.presence * seen)
        too_short = counts.sum(-1).to(torch.int64) < rules.min_new_tokens
        by_node.add_(torch.where(too_short[:, :, None], rules.stop_bias, 0.0))
        scale = torch.where(seen, rules.repetition, 1.0)
        by_node.copy_(torch.where(by_node < 0, by_node * scale, by_node / scale))


def _asked(info: SamplingBatchInfo | None) -> bool:
    """Whether a request of the batch has a penalty, with and without overlap scheduling."""
    if info is None:
        return False
    orchestrator: Any = info.penalizer_orchestrator
    if orchestrator is not None:
        return bool(orchestrator.is_required)
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def _stop_tokens(req: Req) -> list[int]:
    """Tokens that end a request, as the plain server's `min_new_tokens` counts them."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops |= set(req.tokenizer.additional_stop_token_ids or ())
        stops.add(req.tokenizer.eos_token_id)
    return [token for token in stops if token is not None]
