"""The walk follows the target, and every mode samples from the rule's own distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from ddtree.accept import SamplingRule, accept_path, choose_tokens
from ddtree.tree import DraftTree, build_tree
from oracles import walk


def tree_of(seed: int, batch: int, horizon: int, vocab: int, budget: int) -> DraftTree:
    """Trees over small vocabularies, token 0 included; some rows have invalid nodes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, horizon, vocab, generator=generator) * 3
    logits[::2][torch.rand(logits[::2].shape, generator=generator) < 0.6] = -torch.inf
    roots = torch.randint(vocab, (batch,), generator=generator)
    return build_tree(logits, roots, budget)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    horizon=st.integers(1, 8),
    vocab=st.integers(1, 5),
    budget=st.integers(0, 40),
)
def test_the_walk_follows_the_target_while_it_is_a_child(
    seed: int, horizon: int, vocab: int, budget: int
) -> None:
    tree = tree_of(seed, 8, horizon, vocab, budget)
    generator = torch.Generator().manual_seed(seed + 1)
    target = torch.randint(vocab, tree.tokens.shape, generator=generator)
    accepted = accept_path(tree, target)
    for row in range(8):
        path, next_token = walk(
            *(getattr(tree, name)[row].tolist() for name in ("tokens", "parents", "valid")),
            target[row].tolist(),
        )
        length = int(accepted.lengths[row])
        assert accepted.path[row, :length].tolist() == path
        assert (accepted.path[row, length:] == -1).all()
        assert int(accepted.next_tokens[row]) == next_token


def test_every_length_from_the_root_alone_to_the_whole_chain() -> None:
    """A chain of token 0, which must not be mistaken for 'no token'."""
    logits = torch.full((1, 6, 3), -torch.inf)
    logits[..., 0] = 0.0
    tree = build_tree(logits, torch.tensor([0]), 9)
    for agreed in range(7):
        target = torch.zeros(1, 10, dtype=torch.int64)
        target[0, agreed] = 2
        accepted = accept_path(tree, target)
        assert accepted.lengths.tolist() == [agreed + 1]
        assert accepted.path.tolist() == [[*range(agreed + 1), *[-1] * (6 - agreed)]]
        assert accepted.next_tokens.tolist() == [2]


def test_invalid_nodes_are_never_accepted() -> None:
    """Invalid nodes carry token 0 and no parent; a target that says 0 everywhere must not match."""
    logits = torch.full((2, 2, 4), -torch.inf)
    logits[..., 3] = 0.0
    tree = build_tree(logits, torch.tensor([0, 1]), 6)
    accepted = accept_path(tree, torch.zeros(2, 7, dtype=torch.int64))
    assert accepted.lengths.tolist() == [1, 1]
    assert accepted.next_tokens.tolist() == [0, 0]


@pytest.mark.parametrize("target", [torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 4)])
def test_target_tokens_of_another_shape_or_dtype_are_refused(target: torch.Tensor) -> None:
    tree = build_tree(torch.zeros(1, 2, 3), torch.tensor([1]), 3)
    with pytest.raises(ValueError, match=r"target_tokens is .*; expected int64 \[1, 4\]"):
        accept_path(tree, target)


def filtered_by_enumeration(logits: np.ndarray, rule: SamplingRule) -> np.ndarray:
    """Keep a token when all three filters do, token by token, from their definitions."""
    probs = np.exp(logits / rule.temperature - (logits / rule.temperature).max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = np.zeros_like(probs)
    for rank, token in enumerate(order):
        better = sum(probs[other] for other in order[:rank])
        good = probs[token] >= rule.min_p * probs[order[0]]
        good &= rule.top_p == 1 or better < rule.top_p
        good &= rule.top_k == 0 or rank < rule.top_k
        kept[token] = probs[token] * good
    return kept / kept.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    top_k=st.integers(0, 14),
    min_p=st.sampled_from([0.0, 0.03, 0.2, 0.9]),
)
def test_filters_apply_jointly(
    seed: int, vocab: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    rule = SamplingRule(temperature, top_p, top_k, min_p)
    logits = np.random.default_rng(seed).normal(size=vocab) * 2
    probs = rule.probabilities(torch.tensor(logits))
    np.testing.assert_allclose(probs, filtered_by_enumeration(logits, rule), atol=1e-6)


def test_equal_probabilities_are_cut_by_token_id() -> None:
    probs = SamplingRule(1.0, top_k=2).probabilities(torch.zeros(2, 4))
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0]] * 2


def test_greedy_takes_the_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.0]])
    assert choose_tokens(logits, SamplingRule()).tolist() == [1, 0]
    assert SamplingRule().probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


RULES = {
    "plain": SamplingRule(1.0),
    "cool": SamplingRule(0.7, top_p=0.9),
    "hot": SamplingRule(1.3, top_k=5),
    "joint": SamplingRule(1.3, top_p=0.95, top_k=7, min_p=0.05),
}


@pytest.mark.parametrize("name", RULES)
def test_draws_follow_the_rule(name: str) -> None:
    rule, draws = RULES[name], 200_000
    logits = torch.randn(10, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = filtered_by_enumeration(logits.double().numpy(), rule)
    generator = torch.Generator().manual_seed(11)
    tokens = choose_tokens(logits.expand(draws, -1), rule, generator)
    counts = np.bincount(tokens.numpy(), minlength=10)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert chisquare(counts[possible], expected[possible] * draws).pvalue > 0.001


def test_one_seed_gives_one_sequence() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    rule = SamplingRule(1.0, top_p=0.9)
    first, again, other = (
        choose_tokens(logits, rule, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1; it must be 0"),
        ({"min_p": 1.0}, "min_p is 1.0; it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_a_rule_outside_its_limits_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingRule(**values)
