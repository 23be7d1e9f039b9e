"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.metrics import (
    StageClock,
    accept_histogram,
    debug_summary,
    depth_acceptance,
    tau,
)
from ddtree.tree import build_tree

LENGTHS = [1, 3, 1, 2, 3, 5]


def test_tau_is_the_mean_of_committed_tokens():
    assert tau(LENGTHS) == 2.5
    assert tau([]) == 0.0


def test_histogram_counts_every_length_up_to_the_longest():
    assert accept_histogram(LENGTHS) == {1: 2, 2: 1, 3: 2, 4: 0, 5: 1}
    assert accept_histogram([]) == {}


def test_depth_acceptance_is_conditional_on_the_depth_before():
    # 6 rounds accept the root, 4 reach depth 1, 3 depth 2, 1 depth 3, 1 depth 4.
    assert depth_acceptance(LENGTHS) == [4 / 6, 3 / 4, 1 / 3, 1 / 1]
    assert depth_acceptance([]) == []
    assert depth_acceptance([1, 1]) == []


def test_stage_seconds_add_up_by_name():
    clock = StageClock()
    for _ in range(2):
        with clock.stage("verify"):
            sum(range(1000))
    seconds = clock.seconds()
    assert seconds["verify"] > 0
    assert seconds["draft"] == 0
    assert set(seconds) == {"prefill", "draft", "build", "verify", "accept", "commit"}


def test_debug_summary_of_a_tree_small_enough_to_enumerate():
    # Two positions with probabilities (0.7, 0.3) and (0.6, 0.4): all six prefixes in the tree.
    logits = torch.tensor([[[0.7, 0.3], [0.6, 0.4]]]).log()
    summary = debug_summary(build_tree(logits, torch.tensor([0]), 8))
    assert summary.nodes == 6
    assert summary.depth == 2
    assert summary.nodes_by_depth == [2, 4]
    assert summary.branching == 2.0
    assert summary.mass_by_depth == pytest.approx([1.0, 1.0])
    assert summary.expected_length == pytest.approx(3.0)
    assert "6 nodes, depth 2" in str(summary)


def test_debug_summary_of_a_root_alone():
    summary = debug_summary(build_tree(torch.zeros(1, 2, 3), torch.tensor([1]), 0))
    assert (summary.nodes, summary.depth, summary.branching) == (0, 0, 0.0)
    assert math.isclose(summary.expected_length, 1.0)
