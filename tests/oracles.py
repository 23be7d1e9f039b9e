"""Slow, plain reference implementations that share no code with the library."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product
from math import exp, fsum, inf, log

Prefix = tuple[int, ...]


def log_probabilities(logits: list[float]) -> list[float]:
    """Double-precision log-softmax; a position with NaN or +inf, or without tokens, is all -inf."""
    peak = max(logits)
    if peak in (inf, -inf) or any(value != value for value in logits):
        return [-inf] * len(logits)
    total = peak + log(fsum(exp(value - peak) for value in logits))
    return [value - total for value in logits]


def heap_prefixes(log_probs: list[list[float]], budget: int) -> Iterator[tuple[float, Prefix]]:
    """The `budget` best (score, prefix) in descending order: Algorithm 1 of arXiv 2604.12989."""
    ranked = [sorted(((-lp, t) for t, lp in enumerate(row) if lp > -inf)) for row in log_probs]
    # An entry is (cost, cost of the parent, token ranks); its successors are the next sibling
    # and the first child.
    heap = [(ranked[0][0][0], 0.0, (0,))] if ranked and ranked[0] else []
    for _ in range(budget):
        if not heap:
            return
        cost, base, ranks = heapq.heappop(heap)
        depth, last = len(ranks), ranks[-1]
        yield -cost, tuple(ranked[level][rank][1] for level, rank in enumerate(ranks))
        if last + 1 < len(ranked[depth - 1]):
            sibling = base + ranked[depth - 1][last + 1][0]
            heapq.heappush(heap, (sibling, base, (*ranks[:-1], last + 1)))
        if depth < len(ranked) and ranked[depth]:
            heapq.heappush(heap, (cost + ranked[depth][0][0], cost, (*ranks, 0)))


def all_prefixes(log_probs: list[list[float]]) -> list[tuple[float, Prefix]]:
    """Every (score, prefix) that exists, in descending order of score, by enumeration."""
    found = []
    for depth in range(1, len(log_probs) + 1):
        for prefix in product(range(len(log_probs[0])), repeat=depth):
            score = fsum(log_probs[level][token] for level, token in enumerate(prefix))
            if score > -inf:
                found.append((score, prefix))
    return sorted(found, reverse=True)


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and everything above it, by walking parent pointers."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


def walk(
    tokens: list[int], parents: list[int], valid: list[bool], target: list[int]
) -> tuple[list[int], int]:
    """(accepted nodes from the root down, next token): follow the target while it is a child."""
    path, node = [0], 0
    while True:
        children = [c for c in range(1, len(tokens)) if valid[c] and parents[c] == node]
        match = [c for c in children if tokens[c] == target[node]]
        if not match:
            return path, target[node]
        (node,) = match
        path.append(node)
