"""The tree holds the best prefixes, whatever the logits, dtype, batch and budget."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ddtree.tree as dd
from ddtree.tree import DraftTree, TreeError, build_tree
from oracles import Prefix, all_prefixes, heap_prefixes, log_probabilities

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("normal", "peaked", "ties", "holes", "sparse", "flat")
FIELDS = ("tokens", "parents", "depths", "scores", "valid")


def random_row(kind: str, horizon: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Logits [horizon, vocab] of one request."""
    logits = rng.normal(size=(horizon, vocab)) * 3
    if kind == "peaked":
        logits *= 4
    elif kind == "ties":
        logits = np.round(logits)
    elif kind == "holes":
        logits[rng.random(logits.shape) < 0.5] = -inf
    elif kind == "sparse":  # often fewer prefixes than budget, sometimes positions without tokens
        logits[rng.random(logits.shape) < 0.9] = -inf
    elif kind == "flat":
        logits[:] = rng.integers(-2, 3)
    return logits


def random_batch(kinds: list[str], horizon: int, vocab: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(np.stack([random_row(kind, horizon, vocab, rng) for kind in kinds]))


def roots(count: int) -> Tensor:
    return torch.arange(count) + 7


def prefixes(tree: DraftTree, row: int) -> dict[Prefix, float]:
    """Each valid drafted node of a row as its token prefix, with the tree's score."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    scores, found = tree.scores[row].tolist(), [()]
    for node in range(1, int(tree.valid[row].sum())):
        found.append((*found[parents[node]], tokens[node]))
    named = dict(zip(found[1:], scores[1:], strict=False))
    assert len(named) == len(found) - 1, "a prefix occurs twice"
    return named


def rounding(logits: np.ndarray) -> float:
    """Bound on float32 rounding of a score: a few units per position at the logits' size."""
    finite = np.abs(logits[np.isfinite(logits)])
    size = (finite.max() if finite.size else 0.0) + log(logits.shape[-1])
    return len(logits) * size * 2.0**-22


def assert_best(
    tree: DraftTree, row: int, logits: np.ndarray, best: list[tuple[float, Prefix]], exact: list
) -> None:
    """The row holds the prefixes `best`; those within rounding of the last may be swapped."""
    slack = rounding(logits)
    named = prefixes(tree, row)
    assert len(named) == len(best)
    if not best:
        return
    boundary = best[-1][0]
    missing = [p for score, p in best if score > boundary + 2 * slack and p not in named]
    assert not missing
    for prefix, score in named.items():
        true = sum(exact[level][token] for level, token in enumerate(prefix))
        assert true >= boundary - 2 * slack
        assert abs(true - score) <= slack
    ordered = list(named.values())
    assert ordered == sorted(ordered, reverse=True)


@pytest.mark.parametrize("part", range(8))
def test_random_cases_hold_the_best_prefixes(part: int) -> None:
    """8 parts x 50 shapes x 50 rows = 20,000 cases against the heap builder."""
    rng = np.random.default_rng(part)
    for _ in range(50):
        vocab, horizon = int(rng.integers(2, 201)), int(rng.integers(1, 17))
        budget = int(rng.integers(0, 301) if rng.random() < 0.3 else rng.integers(0, 80))
        kinds = [KINDS[i] for i in rng.integers(0, len(KINDS), 50)]
        logits = random_batch(kinds, horizon, vocab, int(rng.integers(2**31)))
        logits = logits.to(DTYPES[rng.integers(0, 3)])
        tree = build_tree(logits, roots(50), budget)
        tree.check()
        for row, values in enumerate(logits.double().numpy()):
            exact = [log_probabilities(position) for position in values.tolist()]
            assert_best(tree, row, values, list(heap_prefixes(exact, budget)), exact)


@pytest.mark.parametrize("vocab", [2, 3, 5])
@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_small_cases_against_all_prefixes(vocab: int, horizon: int) -> None:
    for seed in range(5):
        logits = random_batch(list(KINDS), horizon, vocab, seed)
        exact = [[log_probabilities(p) for p in row] for row in logits.tolist()]
        every = [all_prefixes(row) for row in exact]
        for budget in (0, 1, 2, 3, 7, 20, 1000):
            tree = build_tree(logits.float(), roots(len(logits)), budget)
            tree.check()
            for row, values in enumerate(logits.numpy()):
                assert_best(tree, row, values, every[row][:budget], exact[row])


@pytest.mark.parametrize("vocab", [31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 1023, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vocabularies_around_chunk_multiples(vocab: int, dtype: torch.dtype) -> None:
    logits = random_batch(list(KINDS), 3, vocab, vocab).to(dtype)
    logits[:, :, -1] += 4  # the last, partial chunk matters
    for budget in (1, 6, 31):
        tree = build_tree(logits, roots(len(logits)), budget)
        tree.check()
        for row, values in enumerate(logits.double().numpy()):
            exact = [log_probabilities(position) for position in values.tolist()]
            assert_best(tree, row, values, list(heap_prefixes(exact, budget)), exact)


def same_row(left: DraftTree, i: int, right: DraftTree, j: int) -> bool:
    return all(torch.equal(getattr(left, f)[i], getattr(right, f)[j]) for f in FIELDS)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    vocab=st.integers(2, 300),
    horizon=st.integers(1, 6),
    budget=st.integers(0, 40),
    chain_seed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_row_does_not_depend_on_its_batch(
    seed: int,
    kinds: list[str],
    vocab: int,
    horizon: int,
    budget: int,
    chain_seed: bool,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    """Permuting, splitting and padding a batch, or a poisoned neighbour, changes no row."""
    logits = random_batch(kinds, horizon, vocab, seed).to(dtype)
    root = roots(len(kinds))
    whole = build_tree(logits, root, budget, chain_seed=chain_seed)
    order = data.draw(st.permutations(range(len(kinds))))
    moved = build_tree(logits[order], root[order], budget, chain_seed=chain_seed)
    poison = torch.full_like(logits[:1], float("nan"))
    padded = build_tree(
        torch.cat([poison, logits]), torch.cat([root[:1], root]), budget, chain_seed=chain_seed
    )
    for row in range(len(kinds)):
        alone = build_tree(
            logits[row : row + 1], root[row : row + 1], budget, chain_seed=chain_seed
        )
        assert same_row(whole, row, alone, 0)
        assert same_row(whole, row, moved, order.index(row))
        assert same_row(whole, row, padded, row + 1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_a_row_does_not_depend_on_its_batch_at_full_size(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(3, 3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        whole = build_tree(logits, roots(3), 32)
        for row in range(3):
            alone = build_tree(logits[row : row + 1], roots(3)[row : row + 1], 32)
            short = build_tree(logits[row : row + 1, :1], roots(3)[row : row + 1], 1)
            assert same_row(whole, row, alone, 0)
            assert torch.equal(short.scores[0, :2], whole.scores[row, :2])
    finally:
        torch.set_num_threads(before)


def test_equal_scores_have_one_order() -> None:
    """Shallow first, then the parent's order, then the smaller token id."""
    tree = build_tree(torch.zeros(1, 2, 3), roots(1), 12)
    assert tree.tokens[0, 1:].tolist() == [0, 1, 2] * 4
    assert tree.parents[0, 1:].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    certain = torch.full((1, 3, 4), -inf)
    certain[0, :, 2] = 0.0  # every score is 0: parents still come first
    tree = build_tree(certain, roots(1), 5)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1, -1]]
    assert tree.valid.tolist() == [[True, True, True, True, False, False]]
    for zeros in ([0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]):  # the two zeros are one value
        tree = build_tree(torch.tensor([[zeros]]), roots(1), 3)
        assert tree.tokens[0, 1:].tolist() == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.integers(2, 130), budget=st.integers(1, 50))
def test_token_ids_only_break_ties(seed: int, vocab: int, budget: int) -> None:
    """Renaming the vocabulary gives the same scores and shape."""
    logits = random_batch(["normal", "ties", "holes"], 4, vocab, seed).float()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(vocab))
    tree, renamed = (build_tree(x, roots(3), budget) for x in (logits, logits[..., order]))
    torch.testing.assert_close(tree.scores, renamed.scores, rtol=1e-6, atol=1e-5)
    assert torch.equal(tree.valid, renamed.valid)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), inf])
@pytest.mark.parametrize("vocab", [7, 700])
def test_a_poisoned_position_yields_no_nodes(vocab: int, poison: float, dtype: torch.dtype) -> None:
    logits = random_batch(["normal"] * 4, 4, vocab, 0).to(dtype)
    for row in range(4):
        logits[row, row, row % vocab] = poison
    tree = build_tree(logits, roots(4), 9)
    tree.check()
    assert [int(tree.depths[row].max()) for row in range(4)] == [0, 1, 2, 3]
    clean = build_tree(logits[3:, :3], roots(4)[3:], 9)
    assert same_row(tree, 3, clean, 0)
    seeded = build_tree(logits, roots(4), 9, chain_seed=True)
    seeded.check()
    assert [int(seeded.depths[row].max()) for row in range(4)] == [0, 1, 2, 3]


def test_positions_without_tokens_yield_no_nodes() -> None:
    logits = torch.full((1, 3, 5), -inf)
    logits[0, 0, :2] = 1.0
    for chain_seed in (False, True):
        tree = build_tree(logits, roots(1), 8, chain_seed=chain_seed)
        tree.check()
        assert sorted(prefixes(tree, 0)) == [(0,), (1,)]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    vocab=st.integers(2, 40),
    horizon=st.integers(1, 8),
    budget=st.integers(1, 30),
)
def test_chain_seed_adds_the_argmax_chain_and_else_the_best(
    seed: int, kind: str, vocab: int, horizon: int, budget: int
) -> None:
    logits = random_batch([kind], horizon, vocab, seed)
    tree = build_tree(logits.float(), roots(1), budget, chain_seed=True)
    tree.check()
    named = prefixes(tree, 0)
    chain: list[Prefix] = [()]
    for position in logits[0, :budget].tolist():
        if max(position) == -inf:
            break
        # The first of the float32 maxima, as the tree breaks ties by id.
        top = np.asarray(position, dtype=np.float32)
        chain.append((*chain[-1], int(top.argmax())))
    assert set(chain[1:]) <= set(named)
    exact = [log_probabilities(position) for position in logits[0].tolist()]
    others = [item for item in heap_prefixes(exact, budget + horizon) if item[1] not in chain]
    others = others[: budget - (len(chain) - 1)]
    assert len(named) == len(chain) - 1 + len(others)
    if others:
        clear = others[-1][0] + 2 * rounding(logits[0].numpy())
        assert {p for score, p in others if score > clear} <= set(named)


def test_a_chain_can_outrank_the_best_set_only_with_chain_seed() -> None:
    """Flat positions push deep prefixes out of the best set; the seeded tree keeps the chain."""
    logits = torch.zeros(1, 6, 50)
    assert int(build_tree(logits, roots(1), 10).depths.max()) == 1
    assert int(build_tree(logits, roots(1), 10, chain_seed=True).depths.max()) == 6


def test_logits_may_be_a_view() -> None:
    base = torch.randn(6, 5, 130, generator=torch.Generator().manual_seed(3))
    views = {
        "sliced": base[:, 1:4, :],
        "transposed": base.transpose(0, 1),
        "strided vocabulary": base[..., ::2],
        "cut vocabulary": base[..., 3:101],
        "expanded": base[:1, :1].expand(4, 3, -1),
    }
    for name, view in views.items():
        copy = view.contiguous()
        left, right = (build_tree(x, roots(len(view)), 3) for x in (view, copy))
        assert all(same_row(left, row, right, row) for row in range(len(view))), name


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_empty_batches_and_horizons(budget: int) -> None:
    empty = build_tree(torch.zeros(0, 3, 5), roots(0), budget)
    assert empty.tokens.shape == (0, budget + 1)
    empty.check()
    flat = build_tree(torch.zeros(2, 0, 5), roots(2), budget)
    flat.check()
    assert flat.valid.sum(1).tolist() == [1, 1]
    assert flat.tokens[:, 0].tolist() == [7, 8]


def test_properties_of_a_tree() -> None:
    tree = build_tree(torch.randn(2, 4, 9), roots(2), 6)
    assert (tree.width, tree.budget, tree.max_depth) == (7, 6, 4)
    positions = tree.positions(torch.tensor([10, 20]))
    assert torch.equal(positions - tree.depths, torch.tensor([[10], [20]]).expand(2, 7))
    assert tree.to("cpu").max_depth == 4
    visible = tree.visibility()
    assert visible.shape == (2, 7, 7)
    assert visible.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize(
    ("logits", "root", "budget", "message"),
    [
        (torch.zeros(2, 5), roots(2), 3, r"draft_logits is torch.float32 \[2, 5\]"),
        (torch.zeros(2, 3, 5, dtype=torch.int64), roots(2), 3, "draft_logits is torch.int64"),
        (torch.zeros(2, 3, 5), roots(3), 3, r"root_tokens is torch.int64 \[3\]"),
        (torch.zeros(2, 3, 5), roots(2).int(), 3, "root_tokens is torch.int32"),
        (torch.zeros(2, 3, 5), roots(2), -1, "budget is -1"),
        (torch.zeros(2, 3, 0), roots(2), 3, "empty vocabulary"),
    ],
)
def test_bad_input_has_one_clear_error(
    logits: Tensor, root: Tensor, budget: int, message: str
) -> None:
    with pytest.raises(TreeError, match=message):
        build_tree(logits, root, budget)


def chain_of_three() -> DraftTree:
    """Root, its children 5 and 6, a grandchild 5 under the first, one invalid node."""
    return DraftTree(
        tokens=torch.tensor([[9, 5, 6, 5, 0]]),
        parents=torch.tensor([[-1, 0, 0, 1, -1]]),
        depths=torch.tensor([[0, 1, 1, 2, 0]]),
        scores=torch.tensor([[0.0, -1.0, -2.0, -3.0, -inf]]),
        valid=torch.tensor([[True, True, True, True, False]]),
        max_depth=2,
    )


MUTATIONS = {
    "the root is valid": ("valid", 0, False),
    "valid nodes come before invalid ones": ("valid", 2, False),
    "the root and invalid nodes have parent -1": ("parents", 4, 0),
    "a parent comes before its child": ("parents", 2, 3),
    "a child is one deeper than its parent": ("depths", 3, 1),
    "the root and invalid nodes have depth 0": ("depths", 4, 1),
    "scores descend": ("scores", 2, -0.5),
    "the root scores 0": ("scores", 0, -0.25),
    "invalid nodes, and only they, score -inf": ("scores", 4, -9.0),
    "tokens are not negative": ("tokens", 3, -1),
    "invalid nodes have token 0": ("tokens", 4, 3),
    "siblings have different tokens": ("tokens", 2, 5),
}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_check_names_the_broken_rule(rule: str) -> None:
    tree = chain_of_three()
    tree.check()
    name, node, value = MUTATIONS[rule]
    field = getattr(tree, name).clone()
    field[0, node] = value
    with pytest.raises(TreeError, match=f"{rule}, but not at batch row 0, node"):
        replace(tree, **{name: field}).check()


def test_check_names_a_depth_beyond_the_bound_and_a_wrong_field() -> None:
    tree = chain_of_three()
    with pytest.raises(TreeError, match="depths stay within max_depth"):
        replace(tree, max_depth=1).check()
    with pytest.raises(TreeError, match="invalid nodes, and only they, score -inf"):
        replace(tree, scores=torch.tensor([[0.0, -1.0, -2.0, -inf, -inf]])).check()
    with pytest.raises(TreeError, match=r"parents is torch.int32 \[1, 5\]"):
        replace(tree, parents=tree.parents.int()).check()
    with pytest.raises(TreeError, match=r"depths is torch.int64 \[1, 4\]"):
        replace(tree, depths=tree.depths[:, :4]).check()
    with pytest.raises(TreeError, match=r"tokens have shape \[5\]"):
        replace(tree, tokens=tree.tokens[0]).check()


@pytest.mark.parametrize(
    ("vocab", "shards", "size", "budget"),
    [(24, 2, 12, 20), (1000, 3, 334, 40), (97, 4, 25, 300), (24, 2, 32, 9), (40, 3, 32, 9)],
)
def test_vocabulary_shards_merge_to_the_tree_of_the_whole(
    vocab: int, shards: int, size: int, budget: int
) -> None:
    """Tensor-parallel ranks hold equal shards of a padded vocabulary; some hold padding alone."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 5, vocab, generator=generator) * 3
    logits[0, 2, 1] = float("nan")
    roots = torch.arange(3)
    padded = torch.nn.functional.pad(logits, (0, size * shards - vocab), value=-inf)
    parts = [dd.top_tokens(part, min(budget, size)) for part in padded.split(size, dim=2)]
    held = dd.TopTokens(
        torch.stack([p.costs for p in parts]),
        torch.stack([p.tokens + i * size for i, p in enumerate(parts)]),
        torch.stack([p.totals for p in parts]),
    )
    top = dd.merge_top_tokens(held, min(budget, vocab))
    merged = dd.tree_of_tokens(top, roots, budget)
    whole = build_tree(logits, roots, budget)
    merged.check()
    for field in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(merged, field), getattr(whole, field)), field
    torch.testing.assert_close(merged.scores, whole.scores)
