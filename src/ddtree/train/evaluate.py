"""Tau by category with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ddtree.train.estimate import DocumentTau

_RESAMPLES = 2000


@dataclass(frozen=True)
class TauInterval:
    """Tau of one category and method, with the 95 % percentile bootstrap over documents.

    Attributes:
        category: source of the documents, or `all`.
        method: `chain`, or the tree's budget as text.
        tau: committed tokens per round; low, high: the interval's ends.
        documents, rounds: what it was measured on.
    """

    category: str
    method: str
    tau: float
    low: float
    high: float
    documents: int
    rounds: int

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)


def tau_intervals(results: Sequence[DocumentTau], seed: int = 0) -> list[TauInterval]:
    """Tau for every category and method, `all` first."""
    generator = torch.Generator().manual_seed(seed)
    categories = sorted({r.source for r in results})
    groups = {"all": list(results)}
    if len(categories) > 1:
        groups.update({c: [r for r in results if r.source == c] for c in categories})
    return [
        _interval(name, method, group, generator)
        for name, group in groups.items()
        for method in (group[0].rounds if group else ())
    ]


def _interval(
    category: str, method: str, group: Sequence[DocumentTau], generator: torch.Generator
) -> TauInterval:
    committed = torch.tensor([r.committed for r in group], dtype=torch.float64)
    rounds = torch.tensor([r.rounds[method] for r in group], dtype=torch.float64)
    drawn = torch.randint(len(group), (_RESAMPLES, len(group)), generator=generator)
    resampled = committed[drawn].sum(1) / rounds[drawn].sum(1)
    low, high = torch.quantile(
        resampled, torch.tensor([0.025, 0.975], dtype=torch.float64)
    ).tolist()
    tau = float(committed.sum() / rounds.sum())
    return TauInterval(category, method, tau, low, high, len(group), int(rounds.sum()))
