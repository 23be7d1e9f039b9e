"""Masks the attention backends read, against a per-node definition of who sees whom."""

from __future__ import annotations

import pytest
import torch

from ddtree import build_tree

pytest.importorskip("sglang", reason="SGLang is not installed")

PREFIXES = (5, 0, 11)


@pytest.fixture(scope="module")
def tree():
    """Three trees of 9 nodes; a vocabulary of 2 leaves some of their nodes invalid."""
    logits = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))
    return build_tree(logits, torch.tensor([1, 0, 1]), 15)


def _ancestors(parents: list[int], node: int) -> set[int]:
    seen = {node}
    while parents[node] >= 0:
        node = parents[node]
        seen.add(node)
    return seen


def test_tree_mask_of_the_cpu_backend(tree) -> None:
    from ddtree.sglang.cpu.attention import RequestGroup

    prefix_lens = torch.tensor(PREFIXES)
    keys = max(PREFIXES) + tree.width
    group = RequestGroup(
        rows=slice(0, 3 * tree.width),
        slots=torch.zeros(3, keys, dtype=torch.int64),
        prefix_lens=prefix_lens,
        query_positions=tree.positions(prefix_lens),
        tree=tree.visibility(),
    )
    for window in (-1, 2):
        mask = group.mask(bidirectional=False, window=window, dtype=torch.float32)
        assert mask is not None
        for row, prefix in enumerate(PREFIXES):
            parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
            for node in range(tree.width):
                position = prefix + depths[node]
                visible = set(range(prefix)) | {
                    prefix + other for other in _ancestors(parents, node)
                }
                if window >= 0:
                    where = list(range(prefix)) + [prefix + depth for depth in depths]
                    visible = {key for key in visible if position - where[key] <= window}
                found = set((mask[row, 0, node] == 0).nonzero().flatten().tolist())
                assert found == visible


def test_flat_mask_for_gpu_backends(tree) -> None:
    from ddtree.sglang.verify import flat_tree_mask

    flat = flat_tree_mask(tree.visibility(), torch.tensor(PREFIXES), sum(PREFIXES) + 7)
    start = 0
    for row, prefix in enumerate(PREFIXES):
        size = tree.width * (prefix + tree.width)
        mask = flat[start : start + size].view(tree.width, prefix + tree.width)
        start += size
        for node in range(tree.width):
            visible = set(range(prefix)) | {
                prefix + other for other in _ancestors(tree.parents[row].tolist(), node)
            }
            assert set(mask[node].nonzero().flatten().tolist()) == visible


def test_sinks_take_their_share_of_the_softmax_and_add_nothing() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    from ddtree.sglang.cpu.attention import with_sinks

    batch, heads, queries, keys, size = 2, 4, 3, 7, 8
    query = torch.randn(batch, heads, queries, size)
    key, value = torch.randn(2, batch, heads // 2, keys, size).unbind(0)
    hidden = torch.rand(batch, 1, queries, keys) < 0.4
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    sinks = torch.randn(heads)
    longer = with_sinks(key, value, mask, sinks, queries)
    found = scaled_dot_product_attention(query, longer[0], longer[1], longer[2], enable_gqa=True)

    scores = query @ key.repeat_interleave(2, 1).mT / size**0.5 + mask
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]
    expected = weights / total @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected)
