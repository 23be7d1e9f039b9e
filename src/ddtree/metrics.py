"""What a person asks of speculative decoding: lengths, times, and a tree at a glance."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from ddtree.tree import DraftTree

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")


class StageClock:
    """Seconds spent in each stage of decoding.

    On CUDA a stage is measured with a pair of events, which costs no synchronisation; `seconds`
    waits for them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage, one of `STAGES`."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((name, before, after))

    def seconds(self) -> dict[str, float]:
        """Total per stage so far."""
        if self._events:
            torch.cuda.synchronize()
            for name, before, after in self._events:
                self._seconds[name] += before.elapsed_time(after) / 1000
            self._events.clear()
        return dict(self._seconds)


def tau(accept_lengths: Sequence[int]) -> float:
    """Mean tokens committed per round, the bonus token included; 0 without rounds."""
    return sum(accept_lengths) / len(accept_lengths) if accept_lengths else 0.0


def accept_histogram(accept_lengths: Sequence[int]) -> dict[int, int]:
    """Rounds by tokens committed, from 1 to the longest."""
    counts = Counter(accept_lengths)
    return {length: counts[length] for length in range(1, max(counts, default=0) + 1)}


def depth_acceptance(accept_lengths: Sequence[int]) -> list[float]:
    """Conditional acceptance by depth.

    Entry d - 1 is the share of rounds that accepted a node at depth d among those that accepted
    one at depth d - 1 (every round accepts the root). A round that commits n tokens accepted nodes
    down to depth n - 1.
    """
    reached = [
        sum(length > depth for length in accept_lengths)
        for depth in range(max(accept_lengths, default=0))
    ]
    return [deep / shallow for shallow, deep in pairwise(reached)]


@dataclass(frozen=True)
class TreeSummary:
    """One tree of a batch in numbers.

    Attributes:
        nodes: valid drafted nodes.
        depth: the deepest.
        nodes_by_depth: from depth 1 on.
        branching: mean children of the nodes that have any, the root included.
        mass_by_depth: drafter's probability that the token at each depth is in the tree.
        expected_length: expected committed tokens under the drafter: 1 + the sum of all prefixes'
            probabilities (arXiv 2604.12989, Proposition 1).
    """

    nodes: int
    depth: int
    nodes_by_depth: list[int]
    branching: float
    mass_by_depth: list[float]
    expected_length: float

    def __str__(self) -> str:
        depths = " ".join(map(str, self.nodes_by_depth))
        mass = " ".join(f"{m:.2f}" for m in self.mass_by_depth)
        return (
            f"{self.nodes} nodes, depth {self.depth}, branching {self.branching:.2f}, "
            f"nodes by depth [{depths}], mass by depth [{mass}], "
            f"expected length {self.expected_length:.2f}"
        )


def debug_summary(tree: DraftTree, row: int = 0) -> TreeSummary:
    """Summarise one tree of a batch (synchronises the device)."""
    drafted = tree.valid[row].clone()
    drafted[0] = False
    depths = tree.depths[row][drafted].tolist()
    probabilities = tree.scores[row][drafted].double().exp().tolist()
    parents = set(tree.parents[row][drafted].tolist())
    deepest = max(depths, default=0)
    mass = [0.0] * deepest
    for depth, probability in zip(depths, probabilities, strict=True):
        mass[depth - 1] += probability
    return TreeSummary(
        nodes=len(depths),
        depth=deepest,
        nodes_by_depth=[depths.count(d) for d in range(1, deepest + 1)],
        branching=len(depths) / len(parents) if parents else 0.0,
        mass_by_depth=mass,
        expected_length=1 + sum(probabilities),
    )
