"""Trees within a grammar against an enumeration of every prefix."""

from __future__ import annotations

import random
from itertools import product
from math import fsum, log

import pytest
import torch

from ddtree.constrained import Candidates, build_constrained_tree
from oracles import log_probabilities

VOCAB, HORIZON = 40, 3


class RandomGrammar:
    """Allows a few tokens after each prefix, nothing after some, and notes what it was asked."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, path: tuple[int, ...]) -> set[int]:
        rng = random.Random(f"{self.seed} {path}")
        return set(rng.sample(range(VOCAB), rng.choice([0, 1, 2, 5, 12] if path else [3, 9])))

    def __call__(self, path: list[int], node: int) -> torch.Tensor | None:
        assert node == len(self.asked)
        self.asked.append(tuple(path))
        allowed = self.allowed(tuple(path))
        if not allowed:
            return None
        words = [sum(1 << t % 32 for t in allowed if t // 32 == w) for w in range(-(-VOCAB // 32))]
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def enumerate_prefixes(
    grammar: RandomGrammar, scores: list[list[list[float]]], tokens: list[list[int]]
) -> list[tuple[float, tuple[int, ...]]]:
    """Every allowed prefix with its score, best first, equal ones shallow first.

    `scores` are [depth][candidate above][candidate].
    """
    found = []
    for depth in range(1, HORIZON + 1):
        for choices in product(range(len(tokens[0])), repeat=depth):
            path = tuple(tokens[level][c] for level, c in enumerate(choices))
            score = 0.0
            for level in range(depth):
                allowed = grammar.allowed(path[:level])
                if path[level] not in allowed:
                    break
                rows = scores[level]
                row = rows[choices[level - 1] if level and len(rows) > 1 else 0]
                mass = fsum(
                    2.718281828459045**s
                    for s, t in zip(row, tokens[level], strict=True)
                    if t in allowed
                )
                score += row[choices[level]] - log(mass)
            else:
                found.append((score, path))
    return sorted(found, key=lambda one: (-round(one[0], 9), len(one[1])))


def paths_of(tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.width):
        if tree.valid[0, node]:
            parent = int(tree.parents[0, node])
            paths.append((*paths[parent], int(tree.tokens[0, node])))
    return paths[1:]


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_tree_holds_the_best_allowed_prefixes(seed: int, conditional: bool) -> None:
    torch.manual_seed(seed)
    grammar, offered, budget = RandomGrammar(seed), 16, 12
    tokens = torch.stack([torch.randperm(VOCAB)[:offered] for _ in range(HORIZON)])
    rows = offered if conditional else 1
    logits = 3 * torch.randn(HORIZON, rows, offered)
    scores = [[log_probabilities(row) for row in level] for level in logits.tolist()]
    candidates = Candidates(-torch.tensor(scores), tokens)
    tree = build_constrained_tree(candidates, 7, budget, grammar)
    tree.check()
    wanted = enumerate_prefixes(grammar, scores, tokens.tolist())[:budget]
    assert int(tree.valid.sum()) == 1 + len(wanted)
    assert paths_of(tree) == [path for _, path in wanted]
    assert tree.scores[0, 1 : 1 + len(wanted)].tolist() == pytest.approx(
        [score for score, _ in wanted], abs=1e-4
    )
    assert grammar.asked == [(), *paths_of(tree)], "asked for exactly the tree's nodes"


def test_a_forced_token_costs_nothing_however_improbable() -> None:
    """After two forced tokens the tree reaches the third depth before a sibling of the first."""
    costs = -torch.tensor([[0.6, 0.3, 0.1]] * 3).log()[:, None]
    tokens = torch.tensor([[1, 2, 3]] * 3)
    allowed = {0: {1, 2}, 1: {3}, 2: {3}}

    def grammar(path: list[int], node: int) -> torch.Tensor | None:
        return torch.tensor([sum(1 << t for t in allowed.get(len(path), {1}))], dtype=torch.int32)

    tree = build_constrained_tree(Candidates(costs, tokens), 0, 3, grammar)
    assert paths_of(tree) == [(1,), (1, 3), (1, 3, 3)]
    assert tree.scores[0, 3].exp() == pytest.approx(2 / 3)


def test_a_chain_is_the_best_allowed_token_of_each_depth() -> None:
    grammar = RandomGrammar(5)
    costs = -torch.tensor([[0.5, 0.3, 0.2]] * HORIZON).log()[:, None]
    first = sorted(grammar.allowed(()))
    tokens = torch.tensor([[first[0], first[1], 0]] * HORIZON)
    tree = build_constrained_tree(Candidates(costs, tokens), 0, HORIZON, grammar, chain=True)
    tree.check()
    paths = paths_of(tree)
    assert paths[0] == (first[0],)
    assert [len(path) for path in paths] == list(range(1, len(paths) + 1))


@pytest.mark.parametrize("budget", [0, 4])
def test_without_a_draft_or_without_a_grammar_left_the_root_stands_alone(budget: int) -> None:
    nothing = Candidates(torch.empty(0, 1, 1), torch.empty(0, 1, dtype=torch.int64))
    for candidates, mask in (
        (nothing, torch.tensor([-1], dtype=torch.int32)),
        (Candidates(torch.ones(2, 1, 3), torch.tensor([[1, 2, 3]] * 2)), None),
    ):
        tree = build_constrained_tree(candidates, 7, budget, lambda path, node, mask=mask: mask)
        tree.check()
        assert tree.width == budget + 1
        assert tree.tokens[0, 0] == 7
        assert tree.valid.sum() == 1
