"""Choosing the target's token at every node by the request's own decoding rule.

The functions are those the plain server samples with, given one row per node instead of one per
request, so that a tree changes no distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from ddtree.sglang.processors import apply_processors
from ddtree.tree import DraftTree


@dataclass(frozen=True)
class NodeSampling:
    """The fields `Sampler` reads, repeated for the nodes of each request's tree."""

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    sampling_seed: torch.Tensor | None
    need_top_p_sampling: bool
    need_top_k_sampling: bool
    need_min_p_sampling: bool
    max_top_k: int | None
    sampling_mask_batch_indices: None = None

    @classmethod
    def of(cls, info: SamplingBatchInfo, width: int) -> NodeSampling:
        seed = info.sampling_seed
        return cls(
            temperatures=info.temperatures.repeat_interleave(width, dim=0),
            top_ps=info.top_ps.repeat_interleave(width),
            top_ks=info.top_ks.repeat_interleave(width),
            min_ps=info.min_ps.repeat_interleave(width),
            sampling_seed=None if seed is None else seed.repeat_interleave(width),
            need_top_p_sampling=info.need_top_p_sampling,
            need_top_k_sampling=info.need_top_k_sampling,
            need_min_p_sampling=info.need_min_p_sampling,
            max_top_k=info.max_top_k,
        )

    @property
    def unfiltered(self) -> bool:
        """Whether temperature alone shapes the distribution."""
        filters = (self.need_top_p_sampling, self.need_top_k_sampling, self.need_min_p_sampling)
        return not any(filters)


def adjust_logits(
    logits: torch.Tensor,
    info: SamplingBatchInfo | None,
    tree: DraftTree,
    grammar_mask: GrammarMask | None,
) -> None:
    """Apply grammar, bias and custom processors to logits [B * N, V], in place.

    In the plain server's order: grammar mask, logit bias, custom processors, NaN guard.
    """
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info is not None:
        if info.logit_bias is not None:
            by_request = logits.view(*tree.tokens.shape, -1)
            by_request.add_(info.logit_bias[:, None].to(logits.dtype))
        if info.has_custom_logit_processor:
            apply_processors(logits, info, tree)
    sanitize_nan_logits(logits, "DDTREE: verify logits")


def choose_node_tokens(
    logits: torch.Tensor,
    info: SamplingBatchInfo | None,
    positions: torch.Tensor,
    width: int,
    sampler: Sampler,
) -> torch.Tensor:
    """One token per node, int64 [B, width].

    Args:
        logits: float [B * width, V], adjusted; not modified.
        positions: int64 [B * width], prefix length + depth; a seeded request draws the same token
            at the same position as plain decoding.
    """
    if info is None or info.is_all_greedy:
        return logits.argmax(-1).view(-1, width)
    rule = NodeSampling.of(info, width)
    probs = torch.softmax(logits.float() / rule.temperatures, dim=-1)
    tokens, _ = sampler._sample_from_probs(probs, rule, positions, rule.unfiltered)
    return tokens.to(torch.int64).view(-1, width)
