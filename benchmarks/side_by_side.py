"""This project beside its two models, on the same work in one run.

    python benchmarks/side_by_side.py --prompts FILE.jsonl [--ddtree-checkout DIR] \
        --json benchmarks/results/side_by_side.jsonl

* Decoding: plain decoding, our `dflash` and `ddtree`, and `dflash_generate` of z-lab's package
  `dflash` (PyPI), prompt by prompt in turn, greedily, on one target and one drafter.
* Tree building: `build_tree` with its visibility, beside the builder of the paper's research code
  (github.com/liranringel/ddtree: clone it and name the folder; nothing of it is kept here), on the
  drafter's own logits from the decoding part. Without a checkout, beside `tree_build.py`'s heap
  builder, which was written from the paper.

Both drafters have their linear layers packed, so that the comparison is of the algorithms.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree import build_tree, generate
from ddtree.bench.client import chat_ids
from ddtree.bench.machine import environment
from ddtree.bench.plan import Cell
from ddtree.bench.prompts import load_prompts
from ddtree.bench.reference import Models
from ddtree.bench.results import paired_ratio
from ddtree.cpu_linear import pack_linears
from ddtree.drafter.shipped import shipped_drafter
from ddtree.engine.default_target import prepare_default_target
from ddtree.metrics import tau
from tree_build import heap_after_top, heap_search, heap_top

BUILDS_PER_BUDGET = 40
Decoded = tuple[list[int], list[int]]  # tokens and accept lengths


def decoders(models: Models, peer: Any, budget: int, length: int) -> dict[str, Callable]:
    """Functions from prompt ids to what was decoded."""

    def ours(mode: str) -> Callable[[list[int]], Decoded]:
        def run(ids: list[int]) -> Decoded:
            done = generate(
                models.target, models.drafter, ids, mode=mode, max_new_tokens=length,
                budget=budget if mode == "ddtree" else None, eos_token_ids=models.eos,
            )  # fmt: skip
            return done.tokens, done.accept_lengths

        return run

    def theirs(ids: list[int]) -> Decoded:
        from dflash.model import dflash_generate

        with torch.inference_mode():
            done = dflash_generate(
                peer, models.target, torch.tensor([ids]), length, sorted(models.eos),
                return_stats=True,
            )  # fmt: skip
        return done.output_ids[0, len(ids) :].tolist(), list(done.acceptance_lengths)

    return {
        "plain": ours("ar"),
        "dflash": ours("dflash"),
        "z-lab's dflash": theirs,
        f"ddtree:{budget}": ours("ddtree"),
    }


def decode_all(functions: dict[str, Callable], prompts: list[list[int]]) -> dict[str, dict]:
    """Every prompt by every function in rotating order; the first function is the baseline."""
    names = list(functions)
    for function in functions.values():
        function(prompts[0])  # warm-up
    runs: dict[str, list[tuple[Decoded, float]]] = {name: [] for name in names}
    for turn, ids in enumerate(prompts):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.perf_counter()
            done = functions[name](ids)
            runs[name].append((done, time.perf_counter() - start))
    rates = {n: [len(d[0]) / s for d, s in run] for n, run in runs.items()}
    expected = [done[0] for done, _ in runs[names[0]]]
    return {
        name: {
            "tokens_per_second": round(statistics.median(rates[name]), 2),
            "speedup": [round(x, 3) for x in paired_ratio(rates[name], rates[names[0]])],
            "tau": round(tau([length for done, _ in run for length in done[1]]), 3),
            "equal": sum(done[0] == e for (done, _), e in zip(run, expected, strict=True)),
            "outputs": len(run),
        }
        for name, run in runs.items()
    }


def drafter_logits(models: Models, prompts: list[list[int]], length: int) -> Iterator[Tensor]:
    """float32 [L, V] of real rounds: what the drafter says while `ddtree` decodes."""
    assert models.drafter is not None
    original = models.drafter.draft_logits
    seen: list[Tensor] = []

    def keep(*arguments: Any) -> Tensor:
        logits = original(*arguments)
        seen.append(logits[0].float())
        return logits

    models.drafter.draft_logits = keep
    try:
        for ids in prompts:
            generate(models.target, models.drafter, ids, mode="ddtree", max_new_tokens=length)
            yield from seen
            seen.clear()
    finally:
        models.drafter.draft_logits = original


def official_builder(checkout: Path) -> Callable[[Tensor, int], Any]:
    """`build_ddtree_tree` of the research code, taken alone: its module's imports need CUDA tools.

    The module's name is this package's too, so it could not be imported beside it either.
    """
    source = ast.parse((checkout / "ddtree.py").read_text(encoding="utf-8"))
    wanted = {"build_ddtree_tree", "DDTREE_TREE_BUILD_STAGE_ORDER"}
    source.body = [
        node
        for node in source.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    scope: dict[str, Any] = {
        "heapq": heapq, "np": np, "time": time, "torch": torch, "cuda_time": time.perf_counter,
        "empty_stage_times": lambda names: dict.fromkeys(names, 0.0),
    }  # fmt: skip
    exec(compile(source, str(checkout / "ddtree.py"), "exec"), scope)
    return scope["build_ddtree_tree"]


def build_all(
    logits: list[Tensor], budgets: list[int], checkout: Path | None
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Median milliseconds by builder and budget, and how many trees are equally good."""
    root = torch.zeros(1, dtype=torch.int64)
    research = official_builder(checkout) if checkout else None
    other = "research code" if research else "heap from the paper"

    def ours(rows: Tensor, budget: int) -> set[float]:
        tree = build_tree(rows[None], root, budget)
        tree.visibility()
        return tree

    def theirs(rows: Tensor, budget: int) -> Any:
        if research:
            return research(rows, budget)
        tree = heap_after_top(heap_search, heap_top(rows[None], budget), root, budget)
        tree.visibility()
        return tree

    functions = {"build_tree": ours, other: theirs}
    times: dict[str, dict[str, float]] = {name: {} for name in functions}
    same: dict[str, str] = {}
    for budget in budgets:
        taken: dict[str, list[float]] = {name: [] for name in functions}
        equal = 0
        for turn, rows in enumerate(logits):
            made = {}
            for name in list(functions)[:: 1 if turn % 2 else -1]:
                start = time.perf_counter()
                made[name] = functions[name](rows, budget)
                taken[name].append((time.perf_counter() - start) * 1e3)
            log_probs = rows.double().log_softmax(-1)
            scores = [prefix_scores(tree, log_probs) for tree in made.values()]
            equal += torch.allclose(*scores, atol=1e-4)
        for name, one in taken.items():
            times[name][str(budget)] = round(statistics.median(one), 3)
        same[str(budget)] = f"{equal} of {len(logits)}"
    return times, same


def prefix_scores(tree: Any, log_probs: Tensor) -> Tensor:
    """Log-probabilities of the prefixes a tree of either builder holds, best first.

    Scores and not tokens are compared: of two equally probable prefixes either may be taken.
    """
    if isinstance(tree, tuple):
        tokens, parents = [0, *tree[0].tolist()], tree[2]
    else:
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    depths, scores = [0], [0.0]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] + float(log_probs[depths[-1] - 1, token]))
    return torch.tensor(scores).sort(descending=True).values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="JSONL")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--target", help="folder; the default target")
    parser.add_argument("--drafter", help="folder; the shipped drafter")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=int, default=16, help="of ddtree in the decoding part")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 256])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--ddtree-checkout", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import dflash.model as package

    if not torch.cuda.is_available():
        package._cuda_time = time.perf_counter  # its clock synchronises a GPU
    folder = options.drafter or str(shipped_drafter())
    target = options.target or str(prepare_default_target())
    models = Models(target, folder, options.dtype, "cpu")
    peer = package.DFlashDraftModel.from_pretrained(
        folder, dtype=models.target.dtype, attn_implementation="sdpa"
    ).eval()
    pack_linears(peer)
    prompts = [
        chat_ids(models.tokenizer, p, Cell()) for p in load_prompts(options.prompts, options.limit)
    ]
    decoded = decode_all(decoders(models, peer, options.budget, options.max_new_tokens), prompts)
    for name, one in decoded.items():
        print(f"{name:16} {one}")
    logits = []
    for rows in drafter_logits(models, prompts, options.max_new_tokens):
        logits.append(rows.clone())
        if len(logits) == BUILDS_PER_BUDGET:
            break
    times, same = build_all(logits, options.budgets, options.ddtree_checkout)
    print(times, same)
    if options.json:
        record = {
            "benchmark": "side_by_side", **environment(), "prompts": Path(options.prompts).name,
            "count": len(prompts), "dtype": models.dtype, "budget": options.budget,
            "max_new_tokens": options.max_new_tokens, "decoding": decoded, "builders": times,
            "equally_good": same,
        }  # fmt: skip
        options.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
