"""Masks agree with walking the parent pointers, node by node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.mask import ancestor_visibility, pack_bits, tree_attention_mask, unpack_bits
from ddtree.tree import build_tree
from oracles import ancestors


def random_trees(seed: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and depths [batch, width]; a random share of the last nodes is invalid."""
    rng = np.random.default_rng(seed)
    parents = np.full((batch, width), -1)
    depths = np.zeros((batch, width), dtype=np.int64)
    for row in range(batch):
        for node in range(1, int(rng.integers(1, width + 1))):
            # Recent parents make deep trees, any parents bushy ones.
            parents[row, node] = rng.integers(max(0, node - 3) if row % 2 else 0, node)
            depths[row, node] = depths[row, parents[row, node]] + 1
    return torch.from_numpy(parents), torch.from_numpy(depths)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 70))
def test_a_node_sees_itself_and_its_ancestors(seed: int, width: int) -> None:
    parents, _ = random_trees(seed, 4, width)
    visible = ancestor_visibility(parents)
    for row, pointers in enumerate(parents.tolist()):
        for node in range(width):
            seen = set(visible[row, node].nonzero().flatten().tolist())
            assert seen == ancestors(pointers, node)


@pytest.mark.parametrize("width", [1, 2, 3, 64, 65, 130])
def test_a_chain_sees_a_triangle(width: int) -> None:
    parents = torch.arange(-1, width - 1)[None]
    assert torch.equal(
        ancestor_visibility(parents)[0], torch.ones(width, width, dtype=torch.bool).tril()
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 40),
    capacity=st.integers(0, 30),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_attention_mask_by_positions(
    seed: int, width: int, capacity: int, window: int | None
) -> None:
    """A key is seen when it is committed or an ancestor, and near enough in positions."""
    parents, depths = random_trees(seed, 3, width)
    prefix_lens = torch.from_numpy(np.random.default_rng(seed).integers(0, capacity + 1, 3))
    mask = tree_attention_mask(
        ancestor_visibility(parents), depths, prefix_lens, capacity, window=window
    )
    assert mask.shape == (3, width, capacity + width)
    assert mask.any(-1).all()
    for row, pointers in enumerate(parents.tolist()):
        committed = int(prefix_lens[row])
        for node in range(width):
            position = committed + int(depths[row, node])
            expected = set(range(committed))
            near = {a: committed + int(depths[row, a]) for a in ancestors(pointers, node)}
            if window is not None:
                expected = {slot for slot in expected if slot > position - window}
                near = {a: p for a, p in near.items() if p > position - window}
            expected |= {capacity + a for a in near}
            assert set(mask[row, node].nonzero().flatten().tolist()) == expected


def test_a_window_counts_depth_and_not_node_index() -> None:
    """Twenty siblings are all one position after the root, so a window of 2 shows it to each."""
    tree = build_tree(torch.zeros(1, 1, 20), torch.tensor([3]), 20)
    mask = tree_attention_mask(tree.visibility(), tree.depths, torch.tensor([5]), 5, window=2)
    assert mask[0, :, 5].all()
    assert not mask[0, 1:, :5].any()
    assert mask[0, 0, :5].tolist() == [False, False, False, False, True]


def test_a_window_below_one_is_refused() -> None:
    tree = build_tree(torch.zeros(1, 1, 4), torch.tensor([3]), 2)
    with pytest.raises(ValueError, match="window is 0; a sliding window holds at least 1 token"):
        tree_attention_mask(tree.visibility(), tree.depths, torch.tensor([5]), 5, window=0)


@pytest.mark.parametrize("columns", [0, 1, 7, 8, 9, 16, 33, 64, 65])
def test_packed_bits_are_numpys_little_order(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    mask = torch.rand(3, 5, columns, generator=generator) < 0.5
    packed = pack_bits(mask)
    expected = np.packbits(mask.numpy(), axis=-1, bitorder="little")
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), expected)
    assert torch.equal(unpack_bits(packed, columns), mask)
