"""Cross-entropy through the borrowed head, without ever holding [tokens, vocabulary].

The head is frozen, so the gradient with respect to the hidden states can be formed chunk by chunk
in the forward pass: two products per chunk, nothing kept but [rows, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.train.batch import IGNORE

# Logits held at once, in elements: 32 MiB of float32.
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the head a training step uses.

    Attributes:
        ids: int64 [C] distinct tokens in ascending order; None for all of them.
        correction: float [C] log importance weights: a token drawn with probability p stands
            for 1 / p tokens in the softmax's denominator.
    """

    ids: Tensor | None = None
    correction: Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """Sums over a batch, so that ranks and accumulation steps can be added up.

    Attributes:
        total: scalar, weighted sum of negative log-likelihoods, with gradient.
        weight: scalar, sum of the weights.
        hits, counts: float [b - 1] correct argmax (among the vocabulary used) and labels, by
            position after the root.
        nll: float [b - 1] unweighted sum by position.
    """

    total: Tensor
    weight: Tensor
    hits: Tensor
    counts: Tensor
    nll: Tensor


def position_weights(labels: Tensor, decay: float) -> Tensor:
    """float [A, b - 1]: exp(-(k - 1) / decay) at depth k, 0 where there is no label."""
    depth = torch.arange(labels.shape[1], device=labels.device, dtype=torch.float32)
    return (labels != IGNORE) * torch.exp(-depth / decay)


def dpace_weights(nll: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Weights that follow the drafter's own acceptance (D-PACE), float [A, b - 1].

    The expected accepted length is the sum over k of the product of the first k probabilities;
    its derivative by the log-probability at depth j is the part of that sum with k >= j.
    Probabilities are lifted to alpha + (1 - alpha) p so that deep positions keep learning.
    """
    lifted = alpha + (1 - alpha) * torch.exp(-nll)
    reach = torch.cumprod(torch.where(labels != IGNORE, lifted, 0.0), dim=1)
    return reach.flip(1).cumsum(1).flip(1)


def sample_vocabulary(
    labels: Tensor, common: Tensor, extra: int, size: int, generator: torch.Generator
) -> Vocabulary:
    """Labels, common tokens, and `extra` tokens drawn from the rest as their representatives.

    Args:
        common: int64 tokens that are always present.
        size: of the whole vocabulary.
    """
    kept = torch.unique(torch.cat((labels[labels != IGNORE], common)))
    rest = torch.ones(size, dtype=torch.bool)
    rest[kept.cpu()] = False
    others = rest.nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:extra]].to(kept.device)
    ids = torch.cat((kept, drawn))
    stands_for = torch.zeros(len(ids), device=kept.device)
    if len(drawn):
        stands_for[len(kept) :] = torch.log(torch.tensor(len(others) / len(drawn)))
    order = ids.argsort()
    return Vocabulary(ids[order], stands_for[order])


class _HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy of hidden [A, L, H]; saves its own gradient, not the logits."""

    @staticmethod
    def forward(ctx, hidden, labels, head, correction, decay, alpha):
        blocks, horizon, _ = hidden.shape
        chunk = max(1, _CHUNK_ELEMENTS // (horizon * head.shape[0]))
        grad = torch.empty_like(hidden)
        nll, weights = hidden.new_zeros(blocks, horizon), hidden.new_zeros(blocks, horizon)
        hits = hidden.new_zeros(blocks, horizon)
        for start in range(0, blocks, chunk):
            part = slice(start, start + chunk)
            rows, wanted = hidden[part].flatten(0, 1), labels[part]
            logits = (rows @ head.t()).float()
            if correction is not None:
                logits += correction
            target = wanted.flatten().clamp(min=0)[:, None]
            own = logits.gather(1, target)[:, 0]
            hits[part] = (own >= logits.amax(1)).view_as(wanted) * (wanted != IGNORE)
            log_sum = logits.logsumexp(1)
            nll[part] = (log_sum - own).view_as(wanted) * (wanted != IGNORE)
            weights[part] = (
                position_weights(wanted, decay)
                if alpha is None
                else dpace_weights(nll[part], wanted, alpha)
            )
            logits.sub_(log_sum[:, None]).exp_()
            logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=logits.dtype))
            logits.mul_(weights[part].reshape(-1, 1))
            grad[part] = (logits.to(head.dtype) @ head).view_as(hidden[part])
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(nll, weights, hits)
        return (nll * weights).sum(), nll, weights, hits

    @staticmethod
    def backward(ctx, grad_total, *_):
        (grad,) = ctx.saved_tensors
        return grad * grad_total.to(grad.dtype), None, None, None, None, None


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Tensor,
    *,
    vocabulary: Vocabulary,
    decay: float,
    dpace_alpha: float | None = None,
) -> LossResult:
    """Weighted cross-entropy of the slots after the root.

    Args:
        hidden: [A, b - 1, H]; labels: int64 [A, b - 1], `IGNORE` where there is none.
        head: [V, H] the target's head; it receives no gradient.
        vocabulary: rows to use; must contain every label.
        decay: of the position weights; not used with D-PACE.
        dpace_alpha: D-PACE's lift of probabilities; None for plain position decay.
    """
    if vocabulary.ids is not None:
        rows = torch.searchsorted(vocabulary.ids, labels.clamp(min=0))
        labels = torch.where(labels == IGNORE, IGNORE, rows)
        head = head[vocabulary.ids]
    head = head.to(hidden.dtype)
    total, nll, weights, hits = _HeadLoss.apply(
        hidden, labels, head, vocabulary.correction, decay, dpace_alpha
    )
    counts = (labels != IGNORE).sum(0).float()
    return LossResult(total, weights.sum(), hits.sum(0), counts, nll.sum(0))
