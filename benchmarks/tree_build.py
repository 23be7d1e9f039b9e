"""How fast is `build_tree`? Ratios to heap builders, in one interleaved run.

    python benchmarks/tree_build.py [--vocab V ...] [--batch B ...] [--budget N ...]

For every shape [B, 15, V] and budget, each measured function runs once per repetition, in turn,
so that whatever else the machine does falls on all of them alike; the table shows medians in
milliseconds and medians of the per-repetition ratios. Records replace those of the same shape,
budget and thread count in `results/tree_build.jsonl`.

* `heap` is the builder of the paper (arXiv 2604.12989, Algorithm 1) as research code writes it:
  top-k and log-sum-exp with torch, a copy to NumPy, then `heapq` over tuples of token ranks.
* `lean` has the same top-k and a search tuned for Python: plain lists, no tuples of ranks.
* `limit` is one `amax` over the logits, the least any builder must do: read them all.

The logits are drawn like a drafter's: noise with eight leaders a margin above it that shrinks with
depth, so that early positions are peaked and late ones flat.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddtree import tree as dd
from ddtree.tree import DraftTree, build_tree

HORIZON = 15
VOCABULARIES = (49152, 151936)
BATCHES = (1, 8, 32)
BUDGETS = (16, 32, 64, 128, 256, 512)
RESULTS = Path(__file__).parent / "results" / "tree_build.jsonl"


def drafter_like_logits(batch: int, vocab: int, seed: int = 0) -> Tensor:
    """float32 [batch, HORIZON, vocab]: top probability about 0.9 at depth 1, 0.2 at depth 15."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, HORIZON, vocab, generator=generator) * 2
    margin = torch.linspace(17, 11, HORIZON)[:, None]
    leaders = torch.randint(vocab, (batch, HORIZON, 8), generator=generator)
    heights = margin - torch.arange(8.0) * 1.2
    return logits.scatter_add_(2, leaders, heights.expand(batch, -1, -1))


def heap_top(logits: Tensor, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and ids of each position's best tokens, on the host."""
    values, ids = logits.topk(min(budget, logits.shape[-1]), dim=-1)
    values = values - logits.logsumexp(-1, keepdim=True)
    return values.cpu().numpy(), ids.cpu().numpy()


def heap_search(log_probs: np.ndarray, ids: np.ndarray, budget: int) -> list[list]:
    """Tokens, parents, depths, scores of one request below its root, by Algorithm 1."""
    nodes: list[tuple] = []
    heap = [(-float(log_probs[0, 0]), (0,), 0)]  # cost, token ranks, parent node
    while heap and len(nodes) < budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        nodes.append((int(ids[depth - 1, rank]), parent, depth, -cost))
        if rank + 1 < log_probs.shape[1]:
            step = float(log_probs[depth - 1, rank] - log_probs[depth - 1, rank + 1])
            heapq.heappush(heap, (cost + step, (*ranks[:-1], rank + 1), parent))
        if depth < len(log_probs):
            child = cost - float(log_probs[depth, 0])
            heapq.heappush(heap, (child, (*ranks, 0), len(nodes)))
    return [list(column) for column in zip(*nodes, strict=True)]


def lean_search(log_probs: np.ndarray, ids: np.ndarray, budget: int) -> list[list]:
    """What `heap_search` returns, as fast as plain Python gets."""
    ranked, names = log_probs.tolist(), ids.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    width, horizon = len(ranked[0]), len(ranked)
    # Cost, depth, parent node, token rank, the parent's cost.
    heap = [(-ranked[0][0], 1, 0, 0, 0.0)]
    while heap and len(tokens) < budget:
        cost, depth, parent, rank, base = heapq.heappop(heap)
        level = ranked[depth - 1]
        tokens.append(names[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-cost)
        if rank + 1 < width:
            heapq.heappush(heap, (base - level[rank + 1], depth, parent, rank + 1, base))
        if depth < horizon:
            heapq.heappush(heap, (cost - ranked[depth][0], depth + 1, len(tokens), 0, cost))
    return [tokens, parents, depths, scores]


def heap_after_top(
    search: Callable, top: tuple[np.ndarray, np.ndarray], roots: Tensor, budget: int
) -> DraftTree:
    """Search every request in turn and make the tree's tensors."""
    columns: tuple[list, ...] = ([], [], [], [])
    for log_probs, ids, root in zip(*top, roots.tolist(), strict=True):
        drafted = search(log_probs, ids, budget)
        for column, head, rest in zip(columns, (root, -1, 0, 0.0), drafted, strict=True):
            column.append([head, *rest])
    tokens, parents, depths, scores = map(torch.tensor, columns)
    return DraftTree(tokens, parents, depths, scores, valid=torch.ones_like(tokens).bool())


def measure(functions: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each function in each repetition, interleaved."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times["build"]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def study(logits: Tensor, budget: int, seconds: float) -> dict:
    """One record: medians in milliseconds and ratios of the parts and of the whole."""
    batch, _, vocab = logits.shape
    roots, rows = torch.zeros(batch, dtype=torch.int64), logits.view(-1, vocab)
    top = dd.top_tokens(logits, budget)
    host = heap_top(logits, budget)
    ours = build_tree(logits, roots, budget)
    for search in (heap_search, lean_search):
        theirs = heap_after_top(search, host, roots, budget)
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-5, atol=1e-4)

    def heap_build(search: Callable) -> DraftTree:
        return heap_after_top(search, heap_top(logits, budget), roots, budget)

    times = measure(
        {
            "build": lambda: build_tree(logits, roots, budget),
            "heap": lambda: heap_build(heap_search),
            "lean": lambda: heap_build(lean_search),
            "limit": lambda: logits.amax(-1),
            "build_top": lambda: dd.top_tokens(logits, budget),
            "build_pass": lambda: dd._vocabulary_pass(rows),
            "build_rest": lambda: dd.tree_of_tokens(top, roots, budget),
            "heap_topk": lambda: logits.topk(budget, dim=-1),
            "heap_logsumexp": lambda: logits.logsumexp(-1),
            "heap_rest": lambda: heap_after_top(heap_search, host, roots, budget),
            "lean_rest": lambda: heap_after_top(lean_search, host, roots, budget),
        },
        seconds,
    )
    record = {"batch": batch, "vocab": vocab, "horizon": HORIZON, "budget": budget}
    record |= {f"{name}_ms": round(statistics.median(t), 4) for name, t in times.items()}
    ratios = {
        "speedup": ("heap", "build"),
        "speedup_lean": ("lean", "build"),
        "speedup_rest": ("heap_rest", "build_rest"),
        "speedup_rest_lean": ("lean_rest", "build_rest"),
        "times_limit": ("build", "limit"),
    }
    for name, (slow, fast) in ratios.items():
        pairs = zip(times[slow], times[fast], strict=True)
        record[name] = round(statistics.median(a / b for a, b in pairs), 3)
    return record | {
        "repetitions": len(times["build"]),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


COLUMNS = {
    "B": "batch",
    "V": "vocab",
    "budget": "budget",
    "heap": "heap_ms",
    "= topk": "heap_topk_ms",
    "+ lse": "heap_logsumexp_ms",
    "+ rest": "heap_rest_ms",
    "lean rest": "lean_rest_ms",
    "build": "build_ms",
    "= pass": "build_pass_ms",
    "(+ top-k)": "build_top_ms",
    "+ rest ": "build_rest_ms",
    "amax": "limit_ms",
    "heap/build": "speedup",
    "lean/build": "speedup_lean",
    "rest": "speedup_rest",
    "lean rest ": "speedup_rest_lean",
    "build/amax": "times_limit",
}


def row(values: list) -> str:
    pairs = zip(COLUMNS, values, strict=True)
    return " ".join(f"{value:>{max(7, len(name))}}" for name, value in pairs)


def store(record: dict, path: Path) -> None:
    """Add a record, in place of the one of the same shape, budget and threads."""
    keys = ("vocab", "batch", "budget", "threads")
    lines = path.read_text().splitlines() if path.exists() else []
    records = {tuple(old[key] for key in keys): old for old in map(json.loads, lines)}
    records[tuple(record[key] for key in keys)] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(records[key]) + "\n" for key in sorted(records)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--budget", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--seconds", type=float, default=2.0, help="per shape and budget")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the records go")
    arguments = parser.parse_args()
    print(f"medians in ms with {torch.get_num_threads()} threads; x/y: median ratio of times")
    print(row(list(COLUMNS)))
    for vocab in arguments.vocab:
        for batch in arguments.batch:
            logits = drafter_like_logits(batch, vocab)
            for budget in arguments.budget:
                record = study(logits, budget, arguments.seconds)
                store(record, arguments.json)
                print(row([record[key] for key in COLUMNS.values()]), flush=True)


if __name__ == "__main__":
    main()
