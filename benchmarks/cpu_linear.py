"""What packed weights do for a verify forward: packed against plain linear layers, interleaved.

    python benchmarks/cpu_linear.py --json benchmarks/results/cpu_linear.jsonl

Prints milliseconds of one forward of the default target over a tree of each width after 200 tokens
of context, with both kinds of layers, and appends one JSON record.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from ddtree import build_tree
from ddtree.cpu_linear import pack_linears
from ddtree.engine.default_target import prepare_default_target
from ddtree.engine.target import Target

WIDTHS = (1, 9, 17, 33, 65)
CONTEXT = 200


def load(packed: bool) -> Target:
    """The default target in float32 with a prefilled cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepare_default_target(), dtype=torch.float32)
    if packed:
        pack_linears(model)
    view = Target(model.eval(), CONTEXT + max(WIDTHS), ())
    prompt = torch.randint(5, 40_000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    view.prefill(prompt)
    return view


@torch.inference_mode()
def measure(repeats: int) -> dict[str, dict[int, float]]:
    """Median milliseconds by kind and width; kinds alternate within each repeat."""
    views = {"plain": load(False), "packed": load(True)}
    vocab = views["plain"].config.vocab_size
    generator = torch.Generator().manual_seed(1)
    times: dict[str, dict[int, list[float]]] = {k: {w: [] for w in WIDTHS} for k in views}
    for width in WIDTHS:
        logits = torch.randn(1, 15, vocab, generator=generator)
        tree = build_tree(logits, torch.tensor([5]), width - 1)
        for repeat in range(repeats + 1):
            for kind, view in views.items():
                start = time.perf_counter()
                view.verify(tree)
                if repeat:  # the first is warm-up
                    times[kind][width].append((time.perf_counter() - start) * 1e3)
    return {k: {w: statistics.median(t) for w, t in by.items()} for k, by in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options.repeats)
    print(f"{'width':>5} {'plain ms':>9} {'packed ms':>9} {'ratio':>6} {'to width 1':>11}")
    for width in WIDTHS:
        plain, packed = results["plain"][width], results["packed"][width]
        relative = packed / results["packed"][1]
        print(f"{width:5} {plain:9.1f} {packed:9.1f} {plain / packed:6.2f} {relative:11.2f}")
    if options.json:
        record = {
            "benchmark": "cpu_linear",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "context": CONTEXT,
            "repeats": options.repeats,
            "milliseconds": results,
        }
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
