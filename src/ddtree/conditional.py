"""Best-first trees for drafter heads whose score of a token depends on the tokens before it.

A plain DFlash drafter gives one distribution per depth. DFlash2's selector scores a token given
the one before it, and Domino given the whole drafted prefix. The best tree is still the one of the
`budget` most probable prefixes, and a prefix is never more probable than its parent, so the search
goes level by level as in `ddtree.tree`: of the prefixes of one depth only the best
``budget - depth + 1`` can be in the tree, and only they are asked for children.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddtree.tree import (
    _LOW_HALF,
    DraftTree,
    TreeError,
    _cost_half,
    _keys,
    _nodes_at,
    _tree_of,
    root_tree,
    top_tokens,
)


@dataclass(frozen=True)
class Frontier:
    """The prefixes of one depth that may have children, best first; depth 0 is the root alone.

    Attributes:
        depth: of its prefixes, 0 for the root.
        tokens: int64 [B, P], each prefix's last token.
        parents: int64 [B, P], indices into the frontier before this one; 0 at depth 0.
        choices: int64 [B, P], which of its parent's candidates a prefix is; 0 at depth 0.
    """

    depth: int
    tokens: Tensor
    parents: Tensor
    choices: Tensor


@dataclass(frozen=True)
class Candidates:
    """The children a head offers to a frontier.

    Attributes:
        costs: float32 [B, P, K], negative log-probabilities given the prefix; +inf where there is
            no such child. A parent's candidates are different tokens.
        tokens: int64 [B, P, K].
        state: what the head wants to be given back with the next frontier.
    """

    costs: Tensor
    tokens: Tensor
    state: Any = None


class ConditionalHead(Protocol):
    """A drafter head that scores the children of given prefixes, for a batch, without a sync."""

    @property
    def horizon(self) -> int:
        """Depth of the deepest prefix the head can score."""
        ...

    def expand(self, frontier: Frontier, state: Any, count: int) -> Candidates:
        """The `count` best children, or all there are, of each prefix of a frontier.

        Args:
            frontier: prefixes of depth 0 to ``horizon - 1``.
            state: `Candidates.state` of the frontier before this one; None for the root's.
            count: children of one prefix that can matter, at least 1. Offering more is harmless.
        """
        ...


def build_conditional_tree(head: ConditionalHead, root_tokens: Tensor, budget: int) -> DraftTree:
    """The best-first tree under a head's conditional scores, without a device sync.

    Args:
        head: scores the children of given prefixes.
        root_tokens: int64 [B].
        budget: drafted nodes, at least 0.
    Returns:
        The `budget` prefixes with the largest product of conditional probabilities, in descending
        order; equal scores go shallow first, then by the parent's order, then by the head's order
        of candidates. A cost that is NaN or -inf removes its child, so a poisoned head costs speed
        and never correctness.
    Raises:
        TreeError: the budget is negative.
    """
    if budget < 0:
        raise TreeError(f"budget is {budget}; a tree has 0 or more drafted nodes")
    levels = min(head.horizon, budget)
    if levels == 0 or len(root_tokens) == 0:
        return root_tree(root_tokens, budget)
    root = root_tokens[:, None]
    frontier = Frontier(0, root, torch.zeros_like(root), torch.zeros_like(root))
    costs, state = root.new_zeros(root.shape, dtype=torch.float32), None
    all_costs, frontiers = [costs], [frontier]
    for level in range(levels):
        offered = head.expand(frontier, state, budget - level)
        costs, frontier = _best_children(frontier, costs, offered, budget - level)
        state = offered.state
        all_costs.append(costs)
        frontiers.append(frontier)
    return _best_tree(torch.cat(all_costs, dim=1), frontiers, budget)


def _best_children(
    frontier: Frontier, costs: Tensor, offered: Candidates, keep: int
) -> tuple[Tensor, Frontier]:
    """Costs float32 [B, <= keep] and frontier of the cheapest children of all parents."""
    child_costs = torch.where(offered.costs.isfinite(), offered.costs.clamp(min=0) + 0.0, inf)
    totals = (costs[:, :, None] + child_costs).flatten(1)
    places = torch.arange(totals.shape[1], device=totals.device)
    keys = _keys(totals, places).topk(min(keep, len(places)), largest=False).values
    index = keys & _LOW_HALF
    count = child_costs.shape[2]
    children = Frontier(
        depth=frontier.depth + 1,
        tokens=offered.tokens.flatten(1).gather(1, index),
        parents=index // count,
        choices=index % count,
    )
    return _cost_half(keys), children


def _best_tree(costs: Tensor, frontiers: list[Frontier], budget: int) -> DraftTree:
    """The cheapest of all levels' prefixes (costs float32 [B, places]), with their ancestors."""
    count = costs.shape[1]
    keys = _keys(costs, torch.arange(count, device=costs.device))
    keys = keys.topk(min(budget + 1, count), largest=False).values
    places = keys & _LOW_HALF
    first, parent_places, depths = 0, [frontiers[0].parents], [0]
    for above, below in pairwise(frontiers):
        parent_places.append(first + below.parents)
        depths += [below.depth] * below.tokens.shape[1]
        first += above.tokens.shape[1]
    tokens = torch.cat([frontier.tokens for frontier in frontiers], dim=1)
    wanted = torch.cat(parent_places, dim=1).gather(1, places)
    return _tree_of(
        _cost_half(keys),
        tokens.gather(1, places),
        _nodes_at(places, wanted, count),
        torch.tensor(depths, device=costs.device)[places],
        budget,
        max_depth=len(frontiers) - 1,
    )


class SelectorHead:
    """DFlash2's candidate selector: a token is scored given the candidate drafted before it.

    Its probabilities are the softmax over a depth's K candidates, as the drafter samples them.

    Args:
        tokens: int64 [B, L, K], the candidates of each depth, all different.
        scores: float [B, L, K, K], of (candidate one depth above, candidate); at depth 1 the rows
            are equal, since the root is the only predecessor.
    """

    def __init__(self, tokens: Tensor, scores: Tensor) -> None:
        self.tokens = tokens
        self.costs = -scores.float().log_softmax(-1)

    @property
    def horizon(self) -> int:
        return self.tokens.shape[1]

    def expand(self, frontier: Frontier, state: Any, count: int) -> Candidates:
        costs, tokens = self.costs[:, frontier.depth], self.tokens[:, frontier.depth]
        rows = frontier.choices[:, :, None].expand(-1, -1, costs.shape[2])
        return Candidates(costs.gather(1, rows), tokens[:, None].expand(rows.shape))


class DominoHead:
    """Domino: a recurrent network reads the drafted prefix and corrects the drafter's logits.

    The first depth has no correction. At depth d the correction is
    ``project([hidden[d], h])``, with h the recurrent state after root and prefix.

    Args:
        logits: float [B, L, V], the drafter's logits without correction.
        hidden: float [B, L, H], the draft hidden states they were made from.
        gru: one layer, over token embeddings.
        project: ``[H + gru width] -> [V]``.
        embed: token ids to embeddings.
    """

    def __init__(
        self, logits: Tensor, hidden: Tensor, gru: nn.GRU, project: nn.Module, embed: nn.Module
    ) -> None:
        self.logits, self.hidden = logits, hidden
        self.gru, self.project, self.embed = gru, project, embed

    @property
    def horizon(self) -> int:
        return self.logits.shape[1]

    def expand(self, frontier: Frontier, state: Any, count: int) -> Candidates:
        before = None
        if state is not None:
            rows = frontier.parents[:, :, None].expand(-1, -1, state.shape[2])
            before = state.gather(1, rows)
        after = self._read(frontier.tokens, before)
        logits = self.logits[:, frontier.depth, None]
        if frontier.depth:
            hidden = self.hidden[:, frontier.depth, None].expand(-1, after.shape[1], -1)
            logits = logits + self.project(torch.cat([hidden, after], dim=-1))
        top = top_tokens(logits, min(count, logits.shape[2]))
        return Candidates(top.costs, top.tokens, after)

    def _read(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """Recurrent states after one more token (int64 [B, P]): [B, P, gru width]."""
        inputs = self.embed(tokens).flatten(0, 1)[:, None]
        initial = None if before is None else before.flatten(0, 1)[None].contiguous()
        _, after = self.gru(inputs, initial)
        return after[0].unflatten(0, tokens.shape)
