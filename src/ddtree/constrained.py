"""The best-first tree of the prefixes that a grammar allows.

A node the grammar forbids can never be committed, so it must not take a place in the tree. And
where the grammar forbids a token, the target chooses among the others: a prefix's score is the
product of the drafter's probabilities *given* what is allowed after each of its prefixes, and a
token that is forced costs nothing.

Grammars live on the host and are asked one prefix at a time, so this is Algorithm 1 of DDTree
(arXiv 2604.12989) with its heap, for one request. It asks about exactly the nodes of the tree,
whose answers the verifier needs anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from ddtree.tree import DraftTree, root_tree

# Given the drafted tokens below the root and the node they end at: which tokens may follow, int32
# [ceil(V / 32)] with token t at bit t % 32 of word t // 32; None where nothing may.
Grammar = Callable[[list[int], int], Tensor | None]


class Candidates:
    """What the drafter offers one request at every depth, on the host.

    Args:
        costs: float32 [L, R, K], negative log-probabilities, +inf for tokens that do not exist.
            R is 1 where depths are independent; otherwise K, by the candidate chosen one depth
            above.
        tokens: int64 [L, K], different ones at each depth.
    """

    def __init__(self, costs: Tensor, tokens: Tensor) -> None:
        # A poisoned drafter offers nothing.
        chances = (-costs).exp().nan_to_num(nan=0.0, posinf=0.0)
        self._chances = [level.unbind(0) for level in chances.unbind(0)]
        self._tokens = tokens.tolist()
        self._words = (tokens >> 5).unbind(0)
        self._bits = (tokens & 31).to(torch.int32).unbind(0)

    @property
    def horizon(self) -> int:
        """Depth of the deepest prefix that can be scored."""
        return len(self._tokens)

    def allowed(self, depth: int, choice: int, mask: Tensor, count: int) -> _Children:
        """The `count` cheapest children of a prefix of `depth` whose last candidate is `choice`."""
        rows = self._chances[depth]
        may = (mask[self._words[depth]] >> self._bits[depth]) & 1
        chances = rows[min(choice, len(rows) - 1)] * may
        best, choices = chances.topk(min(count, len(chances)))
        total = log(mass) if (mass := float(chances.sum())) > 0 else 0.0
        # Rounding must not make a cost negative.
        costs = [max(0.0, total - log(chance)) for chance in best.tolist() if chance > 0]
        picked = choices[: len(costs)].tolist()
        return _Children(costs, [self._tokens[depth][choice] for choice in picked], picked)


@dataclass(frozen=True)
class _Children:
    """A prefix's allowed continuations, cheapest first."""

    costs: list[float]
    tokens: list[int]
    choices: list[int]


@dataclass(frozen=True)
class _Node:
    cost: float
    parent: int
    choice: int
    path: list[int]  # tokens from the root's child down to the node


def build_constrained_tree(
    candidates: Candidates, root_token: int, budget: int, grammar: Grammar, *, chain: bool = False
) -> DraftTree:
    """The `budget` most probable allowed prefixes of one request.

    Args:
        candidates: the drafter's tokens; a token that is not among them is not drafted.
        root_token: the last committed token.
        budget: drafted nodes, at least 0.
        grammar: asked once for every node of the tree, parents before children.
        chain: the most probable allowed chain instead.
    Returns:
        A tree of batch 1 on the CPU, in descending order of score; equal scores go shallow first,
        then by the parent's order.
    """
    nodes = [_Node(0.0, -1, 0, [])]
    offers: list[_Children] = []
    waiting: list[tuple[float, int, int, int]] = []  # cost, depth, parent, rank among its children

    def offer(parent: int, rank: int) -> None:
        if rank < len(offers[parent].costs):
            cost = nodes[parent].cost + offers[parent].costs[rank]
            heapq.heappush(waiting, (cost, len(nodes[parent].path) + 1, parent, rank))

    while True:
        newest = len(nodes) - 1
        mask = grammar(nodes[-1].path, newest)
        offers.append(_children(candidates, nodes[-1], mask, budget - newest))
        offer(newest, 0)
        if newest == budget or not waiting:
            return _tree(nodes, root_token, budget, min(candidates.horizon, budget))
        cost, _, parent, rank = heapq.heappop(waiting)
        if not chain:
            offer(parent, rank + 1)
        children = offers[parent]
        path = [*nodes[parent].path, children.tokens[rank]]
        nodes.append(_Node(cost, parent, children.choices[rank], path))


def _children(candidates: Candidates, node: _Node, mask: Tensor | None, budget: int) -> _Children:
    if mask is None or len(node.path) >= candidates.horizon or budget == 0:
        return _Children([], [], [])
    return candidates.allowed(len(node.path), node.choice, mask, budget)


def _tree(nodes: list[_Node], root_token: int, budget: int, max_depth: int) -> DraftTree:
    blank = root_tree(torch.tensor([root_token]), budget)
    count = len(nodes)
    blank.tokens[0, 1:count] = torch.tensor([node.path[-1] for node in nodes[1:]])
    blank.parents[0, :count] = torch.tensor([node.parent for node in nodes])
    blank.depths[0, :count] = torch.tensor([len(node.path) for node in nodes])
    blank.scores[0, :count] = 0.0 - torch.tensor([node.cost for node in nodes])
    blank.valid[0, :count] = True
    return DraftTree(
        blank.tokens, blank.parents, blank.depths, blank.scores, blank.valid, max_depth
    )
