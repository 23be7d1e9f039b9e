"""The delta rule and the convolution over trees, against recurrences along every path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddtree.delta import (
    TreeUpdate,
    additive_rule,
    chain_parents,
    chain_visibility,
    convolve_paths,
    delta_rule,
    held_inputs,
    window_places,
)
from ddtree.mask import ancestor_visibility

BATCH, HEADS, KEY, VALUE, CHANNELS, TAPS = 3, 2, 8, 6, 5, 4
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def random_parents(nodes: int, seed: int) -> Tensor:
    """Every node below a random earlier one; the last of the first tree is invalid."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((BATCH, nodes), -1)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(node, (BATCH,), generator=generator)
    if nodes > 2:
        parents[0, -1] = -1
    return parents


def path_to(parents: Tensor, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def inputs(nodes: int, gates: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BATCH, HEADS, *shape, generator=generator)

    keys = torch.nn.functional.normalize(draw(nodes, KEY), dim=-1)
    # Some decays are so strong that their inverse overflows.
    decays = -(draw(nodes, gates).exp() ** 3)
    states = draw(VALUE, KEY)
    return draw(nodes, KEY), keys, draw(nodes, VALUE), decays, draw(nodes).sigmoid(), states


def rule(erases: bool, *tokens: Tensor) -> tuple[Tensor, TreeUpdate]:
    queries, keys, values, gates, betas, states, visibility = tokens
    if erases:
        return delta_rule(queries, keys, values, gates, betas, states, visibility)
    return additive_rule(queries, keys, values, gates, states, visibility)


def step(
    state: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, erases: bool
) -> Tensor:
    """The rules as published, for one token of one head: [V, K]."""
    state = state * gate.exp()
    if erases:
        return state + beta * torch.outer(value - state @ key, key)
    return state + torch.outer(value, key)


# Gated DeltaNet, Kimi Delta Attention, Mamba2.
KINDS = [(1, True), (KEY, True), (1, False)]


@pytest.mark.parametrize(("gates", "erases"), KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 9, 33])
def test_every_node_starts_from_its_parents_state(nodes: int, gates: int, erases: bool) -> None:
    *tokens, states = inputs(nodes, gates)
    parents = random_parents(nodes, seed=nodes)
    outputs, update = rule(erases, *tokens, states, ancestor_visibility(parents))
    queries, *rest = tokens
    for row in range(BATCH):
        after = update.states_after(
            torch.tensor([[row, node] for node in range(nodes)]),
            states[row].expand(nodes, -1, -1, -1),
        )
        for node in range(nodes):
            for head in range(HEADS):
                state = states[row, head]
                for place in path_to(parents[row], node):
                    state = step(state, *(part[row, head, place] for part in rest), erases)
                torch.testing.assert_close(after[node, head], state, **TOLERANCE)
                expected = state @ queries[row, head, node]
                torch.testing.assert_close(outputs[row, head, node], expected, **TOLERANCE)


@pytest.mark.parametrize(("gates", "erases"), KINDS)
def test_a_chain_in_pieces_is_the_chain_at_once(gates: int, erases: bool) -> None:
    *tokens, states = inputs(40, gates)
    whole, update = rule(erases, *tokens, states, chain_visibility(40, states.device))
    ends = torch.tensor([[row, 39] for row in range(BATCH)])
    final = update.states_after(ends, states)
    pieces = []
    for start, end in ((0, 16), (16, 17), (17, 40)):
        piece = [part[:, :, start:end] for part in tokens]
        out, update = rule(erases, *piece, states, chain_visibility(end - start, states.device))
        last = torch.tensor([[row, end - start - 1] for row in range(BATCH)])
        states = update.states_after(last, states)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, **TOLERANCE)
    torch.testing.assert_close(states, final, **TOLERANCE)


@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_every_node_convolves_its_own_path(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    tokens = torch.randn(BATCH, nodes, CHANNELS, generator=generator)
    held = torch.randn(BATCH, CHANNELS, TAPS - 1, generator=generator)
    weights = torch.randn(CHANNELS, TAPS, generator=generator)
    parents = random_parents(nodes, seed=nodes)
    places = window_places(parents, TAPS)
    outputs, row = convolve_paths(tokens, held, weights, None, places)
    for batch in range(BATCH):
        for node in range(nodes):
            path = tokens[batch, path_to(parents[batch], node)].T
            seen = torch.cat([held[batch], path], dim=1)[:, -TAPS:]
            expected = torch.nn.functional.silu((seen * weights).sum(1))
            torch.testing.assert_close(outputs[batch, node], expected, **TOLERANCE)
            kept = held_inputs(row[batch : batch + 1], places[batch : batch + 1, node])
            torch.testing.assert_close(kept[0], seen[:, 1:], **TOLERANCE)


def test_a_chains_windows_slide() -> None:
    places = window_places(chain_parents(1, 4, torch.device("cpu")), TAPS)
    assert places[0].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
