"""Trees under conditional scores hold exactly the most probable prefixes the head defines."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddtree import build_tree
from ddtree.conditional import (
    Candidates,
    ConditionalHead,
    DominoHead,
    Frontier,
    SelectorHead,
    build_conditional_tree,
)
from ddtree.tree import DraftTree, TreeError, top_tokens

Prefix = tuple[int, ...]


class MarginalHead:
    """A plain DFlash drafter as a conditional head: a token's score ignores what came before."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.horizon = logits.shape[1]

    def expand(self, frontier: Frontier, state: Any, count: int) -> Candidates:
        level = self.logits[:, frontier.depth, None]
        top = top_tokens(level, min(count, level.shape[2]))
        shape = (*frontier.tokens.shape, top.costs.shape[2])
        return Candidates(top.costs.expand(shape), top.tokens.expand(shape))


class TableHead:
    """Every prefix has its own distribution, looked up: the most general head there is."""

    def __init__(self, tables: list[dict[Prefix, Tensor]], horizon: int) -> None:
        self.tables, self.horizon = tables, horizon

    def expand(self, frontier: Frontier, state: Any, count: int) -> Candidates:
        prefixes = []
        for row in range(len(self.tables)):
            if frontier.depth == 0:
                prefixes.append([()])
                continue
            parents, tokens = frontier.parents[row].tolist(), frontier.tokens[row].tolist()
            prefixes.append([(*state[row][p], t) for p, t in zip(parents, tokens, strict=True)])
        costs = torch.stack(
            [-torch.stack([table[p] for p in kept])
             for table, kept in zip(self.tables, prefixes, strict=True)]
        )  # fmt: skip
        tokens = torch.arange(costs.shape[2]).expand(costs.shape)
        return Candidates(costs, tokens, prefixes)


def prefixes_of(tree: DraftTree, row: int) -> dict[Prefix, float]:
    """The tree's prefixes below the root with their scores, in order."""
    found: dict[int, Prefix] = {0: ()}
    for node in range(1, tree.width):
        if tree.valid[row, node]:
            parent = int(tree.parents[row, node])
            found[node] = (*found[parent], int(tree.tokens[row, node]))
    return {found[node]: float(tree.scores[row, node]) for node in list(found)[1:]}


def check_best(tree: DraftTree, row: int, scored: dict[Prefix, float], budget: int) -> None:
    """`tree` holds the best `budget` of all prefixes, found by enumeration in double precision."""
    tree.check()
    ours = prefixes_of(tree, row)
    best = sorted((score for score in scored.values() if score > -inf), reverse=True)[:budget]
    assert list(ours.values()) == pytest.approx(best, abs=1e-5)
    for prefix, score in ours.items():
        assert score == pytest.approx(scored[prefix], abs=1e-5)


def enumerate_prefixes(log_prob: Any, tokens: int, horizon: int) -> dict[Prefix, float]:
    """Scores of all prefixes from ``log_prob(prefix, token)``."""
    scored: dict[Prefix, float] = {(): 0.0}
    for depth in range(horizon):
        for prefix in product(range(tokens), repeat=depth):
            for token in range(tokens):
                scored[(*prefix, token)] = scored[prefix] + float(log_prob(prefix, token))
    del scored[()]
    return scored


@pytest.mark.parametrize("budget", [0, 1, 4, 13, 60])
def test_without_conditions_it_is_build_tree(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    # Few distinct values, so that many scores tie.
    logits = torch.randint(0, 3, (5, 4, 9), generator=generator).float()
    roots = torch.arange(5)
    expected = build_tree(logits, roots, budget)
    tree = build_conditional_tree(MarginalHead(logits), roots, budget)
    for name in ("tokens", "parents", "depths", "scores", "valid"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name


@pytest.mark.parametrize("budget", [1, 3, 10, 25, 500])
def test_the_best_prefixes_of_any_head(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    tables = []
    for _ in range(3):
        table = {}
        for depth in range(4):
            for prefix in product(range(4), repeat=depth):
                logits = 3 * torch.randn(4, generator=generator)
                if torch.rand((), generator=generator) < 0.2:
                    logits[0] = -inf
                table[prefix] = logits.log_softmax(-1)
        tables.append(table)
    head: ConditionalHead = TableHead(tables, horizon=4)
    tree = build_conditional_tree(head, torch.tensor([7, 8, 9]), budget)
    for row, table in enumerate(tables):
        scored = enumerate_prefixes(lambda prefix, token, t=table: t[prefix][token], 4, 4)
        check_best(tree, row, scored, budget)


@pytest.mark.parametrize("budget", [1, 6, 40])
def test_selector_trees_are_the_best_of_the_lattice(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    tokens = torch.stack([torch.randperm(20, generator=generator)[:3] for _ in range(8)])
    tokens = tokens.view(2, 4, 3)
    scores = 2 * torch.randn(2, 4, 3, 3, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    tree = build_conditional_tree(SelectorHead(tokens, scores), torch.tensor([1, 2]), budget)
    log_probs = scores.double().log_softmax(-1)
    for row in range(2):
        ranked = enumerate_prefixes(
            lambda p, c, r=row: log_probs[r, len(p), p[-1] if p else 0, c], 3, 4
        )
        ids = tokens[row].tolist()
        scored = {
            tuple(ids[d][choice] for d, choice in enumerate(prefix)): score
            for prefix, score in ranked.items()
        }
        check_best(tree, row, scored, budget)


def domino_parts(vocab: int, hidden: int, width: int) -> tuple[nn.GRU, nn.Sequential, nn.Embedding]:
    torch.manual_seed(0)
    gru = nn.GRU(hidden, width, batch_first=True, bias=False)
    project = nn.Sequential(
        nn.Linear(hidden + width, 6, bias=False), nn.SiLU(), nn.Linear(6, vocab, bias=False)
    )
    for weight in (*gru.parameters(), *project.parameters()):
        nn.init.normal_(weight)
    return gru, project, nn.Embedding(vocab, hidden)


@torch.no_grad()
def test_domino_trees_are_the_best_of_all_prefixes() -> None:
    vocab, horizon, budget = 5, 4, 30
    gru, project, embed = domino_parts(vocab, hidden=8, width=7)
    logits, hidden = torch.randn(2, horizon, vocab), torch.randn(2, horizon, 8)
    roots = torch.tensor([3, 0])
    head = DominoHead(logits, hidden, gru, project, embed)
    tree = build_conditional_tree(head, roots, budget)

    def log_prob(row: int, prefix: Prefix, token: int) -> Tensor:
        scores = logits[row, len(prefix)]
        if prefix:
            _, state = gru(embed(torch.tensor([[int(roots[row]), *prefix]])))
            scores = scores + project(torch.cat([hidden[row, len(prefix)], state[0, 0]]))
        return scores.double().log_softmax(-1)[token]

    for row in range(2):
        scored = enumerate_prefixes(lambda p, t, r=row: log_prob(r, p, t), vocab, horizon)
        check_best(tree, row, scored, budget)


@torch.no_grad()
def test_the_best_domino_child_of_each_node_continues_sglangs_rollout() -> None:
    """SGLang's greedy rollout takes the best child of the best child: it is a path of the tree."""
    rollout = pytest.importorskip("sglang.srt.speculative.domino_utils").domino_greedy_rollout
    vocab, block, hidden_size = 6, 5, 8
    gru, project, embed = domino_parts(vocab, hidden_size, width=7)
    block_hidden, head_weight = torch.randn(3, block, hidden_size), torch.randn(vocab, hidden_size)
    roots = torch.tensor([2, 5, 1])
    chain = rollout(
        draft_hidden=block_hidden, bonus_tokens=roots, target_embedding=embed,
        lm_head_weight=head_weight, prefix_gru=gru, embed_proj=project, shift_label=False,
        vocab_size=vocab, candidate_pool_size=0, in_cuda_graph=False,
    )  # fmt: skip
    hidden = block_hidden[:, 1:]
    head = DominoHead(hidden @ head_weight.T, hidden, gru, project, embed)
    every_prefix = sum(vocab**depth for depth in range(1, block))
    tree = build_conditional_tree(head, roots, every_prefix)
    for row in range(3):
        # Nodes are in order of score, so a node's first child is its best.
        path, node = [], 0
        while node in tree.parents[row].tolist():
            node = tree.parents[row].tolist().index(node)
            path.append(int(tree.tokens[row, node]))
        assert path == chain[row].tolist()


def test_a_poisoned_head_gives_no_nodes() -> None:
    scores = torch.randn(2, 3, 2, 2)
    scores[0, 1] = torch.nan
    tokens = torch.arange(2).expand(2, 3, 2)
    tree = build_conditional_tree(SelectorHead(tokens, scores), torch.tensor([1, 1]), 20)
    tree.check()
    assert tree.valid.sum(1).tolist() == [1 + 2, 1 + 2 + 4 + 8]


def test_a_negative_budget_is_refused() -> None:
    head = SelectorHead(torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, 1))
    with pytest.raises(TreeError, match="budget is -1"):
        build_conditional_tree(head, torch.tensor([0]), -1)
