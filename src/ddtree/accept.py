"""Choosing the target's tokens and walking a verified tree.

The draft tree is a deterministic function of the drafter's logits, so the exact verifier is to
choose one target token per node with the request's own decoding rule and to walk from the root
while the chosen token is a child (DDTree, arXiv 2604.12989, section 3). Every mode chooses with
`choose_tokens`, so plain, chain and tree decoding sample from one distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What one verify forward commits.

    Attributes:
        path: int64 [B, L + 1], node indices from the root down, -1 after the last accepted node.
        lengths: int64 [B], accepted nodes with the root = tokens committed by the round (the
            accepted drafts and `next_tokens`).
        next_tokens: int64 [B], the target's token at the last accepted node: the next root.
    """

    path: Tensor
    lengths: Tensor
    next_tokens: Tensor


def accept_path(tree: DraftTree, target_tokens: Tensor) -> Acceptance:
    """Walk from the root while the target's token is a child; no device sync.

    Args:
        tree: B trees of N nodes.
        target_tokens: int64 [B, N], the token the target chose at each node.
    Raises:
        ValueError: `target_tokens` has another shape or dtype.
    """
    if target_tokens.shape != tree.tokens.shape or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens is {target_tokens.dtype} {list(target_tokens.shape)}; "
            f"expected int64 {list(tree.tokens.shape)}"
        )
    batch, width = tree.tokens.shape
    parents = tree.parents.clamp(min=0)
    accepted = tree.valid & (tree.tokens == target_tokens.gather(1, parents))
    accepted[:, 0] = True
    # A node is accepted when it and all its ancestors match: pointer doubling towards the root.
    jump = parents
    for _ in range(max(tree.max_depth, 1).bit_length()):
        accepted = accepted & accepted.gather(1, jump)
        jump = jump.gather(1, jump)
    # Siblings hold different tokens, so each depth has at most one accepted node.
    path = torch.full((batch, tree.max_depth + 2), -1, dtype=torch.int64, device=parents.device)
    slots = torch.where(accepted, tree.depths, tree.max_depth + 1)
    nodes = torch.arange(width, device=parents.device).expand(batch, -1)
    path = path.scatter(1, slots, nodes)[:, :-1]  # the last column gathers the rest
    lengths = accepted.sum(1)
    last = path.gather(1, lengths[:, None] - 1)
    return Acceptance(path, lengths, target_tokens.gather(1, last)[:, 0])


@dataclass(frozen=True)
class SamplingRule:
    """How a target token is chosen from logits.

    `temperature` 0 is greedy. The filters apply to the distribution after temperature, jointly as
    in SGLang: `top_k` (0 = off) keeps the k most probable tokens, `top_p` the smallest set of
    most probable tokens whose mass reaches p, `min_p` those at least min_p times as probable as
    the best; a token must pass all three.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "0 (off) or more and below 1"),
        }
        for name, (good, allowed) in limits.items():
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 [..., V], the distribution this rule samples from."""
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, best, 1.0)
        probs = torch.softmax(logits.float() / self.temperature, dim=-1)
        if not self.filtered:
            return probs
        if self.top_p == 1 and self.top_k == 0:  # needs the best only, not the whole order
            kept = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
            return kept / kept.sum(-1, keepdim=True)
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        keep = ordered >= self.min_p * ordered[..., :1]
        if self.top_p < 1:
            keep &= ordered.cumsum(-1) - ordered < self.top_p
        if self.top_k > 0:
            keep[..., self.top_k :] = False
        kept = torch.zeros_like(probs).scatter(-1, ids, ordered * keep)
        return kept / kept.sum(-1, keepdim=True)


def choose_tokens(
    logits: Tensor, rule: SamplingRule, generator: torch.Generator | None = None
) -> Tensor:
    """One target token per row by `rule`.

    Args:
        logits: float [..., V].
        generator: source of randomness on the logits' device; the global one when None.
    Returns:
        int64 [...].
    """
    if rule.greedy:
        return logits.argmax(-1)
    probs = rule.probabilities(logits)
    # argmax(p / Exp(1)) draws from p without the host sync of torch.multinomial.
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1)
