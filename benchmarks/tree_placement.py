"""Where should a tree's nodes go? Tau of three ways to spend the same budget, offline.

On a store of the target's own greedy responses (`ddtree train prepare`, or `ddtree eval --work`):

* best: the most probable prefixes under the drafter (DDTree);
* seeded: the same, with the drafter's argmax chain always in the tree;
* tempered: the most probable prefixes after dividing the logits at every depth by a temperature
  that was fitted to the target's tokens, on documents that are not scored.

Every second document fits the temperatures, the others are scored. One JSON line per way and
budget, with the paired 95 % bootstrap interval of its tau over best-first's.

And inside a batch: `shared` gives the nodes of `_REQUESTS` requests to the most probable prefixes
of all, instead of as many to each. Its tau is the mean over anchors of different documents, not a
walk through them, and so is that of best-first, which it is compared with.

    python benchmarks/tree_placement.py --store DIR --out benchmarks/results/tree_placement.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter import load_drafter
from ddtree.drafter.shipped import shipped_drafter
from ddtree.engine.default_target import prepare_default_target
from ddtree.train.batch import IGNORE, pack, valid_anchors
from ddtree.train.estimate import accepted_depths, draft_anchors, rounds_needed
from ddtree.train.store import FeatureStore
from ddtree.tree import build_tree

BEST, SEEDED, TEMPERED, SHARED = "best", "seeded", "tempered", "shared"
_REQUESTS = 8
_DEEPEST_SHARE = 4  # one request is given at most this many times its own budget
_TEMPERATURES = torch.linspace(0.6, 2.0, 15)
# Anchors of a document that fit the temperatures: neighbours say almost the same.
_FIT_EVERY = 8
_RESAMPLES = 2000


def drafts(bound: Any, model: Any, documents: FeatureStore, index: int) -> Iterator[Any]:
    """Logits, labels and roots at every anchor of one document."""
    document = documents[index]
    anchors = valid_anchors(document)
    if not len(anchors):
        return
    batch = pack([document], [anchors], bound.block_size)
    head = model.get_output_embeddings().weight
    batch = batch.to(head.device, bound.model.fc.weight.dtype)
    yield from draft_anchors(bound.model, model.get_input_embeddings(), head, batch)


class TemperatureFit:
    """Negative log-likelihood of the target's tokens by depth and temperature."""

    def __init__(self, depths: int) -> None:
        self._loss = torch.zeros(len(_TEMPERATURES), depths, dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        for row, temperature in enumerate(_TEMPERATURES):
            loss = F.cross_entropy(
                (logits / temperature).transpose(1, 2),
                labels, ignore_index=IGNORE, reduction="none",
            )  # fmt: skip
            self._loss[row] += loss.sum(0)

    @property
    def best(self) -> Tensor:
        """float [depths]."""
        return _TEMPERATURES[self._loss.argmin(0)]


class SharedNodes:
    """Scores and accepted depths of the nodes at every anchor, best first."""

    def __init__(self, budget: int) -> None:
        self._budget, self._scores, self._depths = budget, [], []

    def add(self, logits: Tensor, labels: Tensor, roots: Tensor) -> None:
        tree = build_tree(logits, roots, self._budget)
        self._scores.append(tree.scores[:, 1:])
        self._depths.append(accepted_depths(tree, labels)[:, 1:])

    def record(self, budget: int) -> dict[str, Any]:
        """Tau of batches of random anchors, and its ratio to each request's own `budget` nodes."""
        generator = torch.Generator().manual_seed(0)
        scores, depths = torch.cat(self._scores), torch.cat(self._depths)
        batches = len(scores) // _REQUESTS
        order = torch.randperm(len(scores), generator=generator)[: batches * _REQUESTS]
        scores, depths = (x[order].view(batches, _REQUESTS, -1) for x in (scores, depths))
        reach = scores[..., : budget * _DEEPEST_SHARE]
        best = reach.flatten(1).topk(budget * _REQUESTS).indices
        chosen = torch.zeros(reach.flatten(1).shape, dtype=torch.bool).scatter_(1, best, True)
        shared = (depths[..., : reach.shape[2]] * chosen.view_as(reach)).amax(2).double() + 1
        own = depths[..., :budget].amax(2).double() + 1
        drawn = torch.randint(batches, (_RESAMPLES, batches), generator=generator)
        ratios = shared.sum(1)[drawn].sum(1) / own.sum(1)[drawn].sum(1)
        low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return {
            "way": SHARED, "budget": budget, "requests": _REQUESTS, "tau": float(shared.mean()),
            "over_best": float(shared.mean() / own.mean()), "low": low, "high": high,
            "anchors": int(shared.numel()),
        }  # fmt: skip


def accepted(
    way: str, budget: int, logits: Tensor, labels: Tensor, roots: Tensor, temperatures: Tensor
) -> list[int]:
    """Drafted tokens accepted at every anchor."""
    if way == TEMPERED:
        logits = logits / temperatures[:, None]
    tree = build_tree(logits, roots, budget, chain_seed=way == SEEDED)
    return accepted_depths(tree, labels).amax(1).tolist()


def record(way: str, budget: int, rounds: dict[Any, list[int]], committed: list[int]) -> dict:
    """Tau, and its ratio to best-first's with a bootstrap over documents."""
    tokens = torch.tensor(committed, dtype=torch.float64)
    ours = torch.tensor(rounds[way, budget], dtype=torch.float64)
    best = torch.tensor(rounds[BEST, budget], dtype=torch.float64)
    drawn = torch.randint(
        len(ours), (_RESAMPLES, len(ours)), generator=torch.Generator().manual_seed(0)
    )
    ratios = best[drawn].sum(1) / ours[drawn].sum(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {
        "way": way,
        "budget": budget,
        "tau": float(tokens.sum() / ours.sum()),
        "over_best": float(best.sum() / ours.sum()),
        "low": low,
        "high": high,
        "documents": len(ours),
        "tokens": int(tokens.sum()),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="folder; the default target if unset")
    parser.add_argument("--drafter", type=Path, help="folder; the shipped one if unset")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--limit", type=int, default=120, help="documents, spread evenly")
    asked = parser.parse_args()

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        asked.target or prepare_default_target(), dtype=torch.float32
    ).eval()
    bound = load_drafter(asked.drafter or shipped_drafter(), target=model)
    documents = FeatureStore(asked.store, bound.target_layer_ids)
    step = max(1, len(documents) // asked.limit)
    chosen = list(range(0, len(documents), step))[: asked.limit]
    fit = TemperatureFit(bound.block_size - 1)
    for index in chosen[1::2]:
        for logits, labels, _ in drafts(bound, model, documents, index):
            fit.add(logits[::_FIT_EVERY], labels[::_FIT_EVERY])
    temperatures = fit.best
    print("temperatures", temperatures.tolist(), flush=True)

    cases = [(way, budget) for way in (BEST, SEEDED, TEMPERED) for budget in asked.budgets]
    rounds: dict[Any, list[int]] = {case: [] for case in cases}
    committed = []
    shared = SharedNodes(max(asked.budgets) * _DEEPEST_SHARE)
    for index in chosen[::2]:
        lengths: dict[Any, list[int]] = {case: [] for case in cases}
        for logits, labels, roots in drafts(bound, model, documents, index):
            for case in cases:
                lengths[case] += accepted(*case, logits, labels, roots, temperatures)
            shared.add(logits, labels, roots)
        if lengths[cases[0]]:
            committed.append(len(lengths[cases[0]]))
            for case in cases:
                rounds[case].append(rounds_needed(lengths[case]))
    with asked.out.open("w", encoding="utf-8") as out:
        lines = [record(way, budget, rounds, committed) for way, budget in cases]
        for line in lines + [shared.record(budget) for budget in asked.budgets]:
            line |= {
                "temperatures": temperatures.tolist(), "stores": [s.name for s in asked.store],
                "torch": torch.__version__,
            }  # fmt: skip
            print({k: line[k] for k in ("way", "budget", "tau", "over_best", "low", "high")})
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
