"""Is `DDTREE_BUDGET=auto` ever slower than the best fixed way of decoding, or than plain?

One server per mode: plain, DFLASH, DDTREE at fixed widths and at a chosen one; then plain and a
chosen width with an untrained drafter. All are started first and sleep while they have nothing to
do; then the modes take turns (A B C B C A ...) for every concurrency, one prompt per request in
flight, so that a noisy machine disturbs all alike.

One JSON line per prompt file, mode, drafter and concurrency, written when it is measured: output
tokens per second of every turn; for auto also its ratios to the others in the same turn, the median
with its 95 % bootstrap interval over turns, and so to the best of them. Which one that is, is told
by the turns other than the one compared: the fastest of several noisy numbers is too fast.

    python benchmarks/never_slower.py --prompts prompts.jsonl --out benchmarks/results/FILE.jsonl

Prompt files are those of `ddtree bench`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench.process import ServerProcess
from ddtree.bench.results import paired_ratio
from ddtree.train.prompts import read_prompts

SHIPPED, UNTRAINED = "shipped", "untrained"
AUTO = "auto"
_PROMPTS = 64
_LEAST_TURNS = 5
_LONGEST = 2000  # characters; what is longer measures prefill


@dataclass(frozen=True)
class Mode:
    """A server to measure: `name`, the drafter it is compared for, its flags and environment."""

    name: str
    drafter: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def modes(name: str, folder: Path, widths: list[int], auto_width: int) -> list[Mode]:
    """Plain decoding, a chosen width and, with a drafter of use, DFLASH and fixed widths."""
    draft = ("--speculative-draft-model-path", str(folder))
    tree = ("--speculative-algorithm", "DDTREE", *draft, "--speculative-num-draft-tokens")
    found = [Mode("plain", name, ())]
    if name == SHIPPED:
        found.append(Mode("dflash", name, ("--speculative-algorithm", "DFLASH", *draft)))
        found += [Mode(f"tree{width}", name, (*tree, str(width))) for width in widths]
    chosen = (("DDTREE_BUDGET", AUTO),)
    return [*found, Mode(AUTO, name, (*tree, str(auto_width)), chosen)]


class Server(ServerProcess):
    """A server of one mode, and what is asked of it."""

    def __init__(self, mode: Mode, target: Path, running: int, threads: int, log: Path) -> None:
        arguments = [
            *("--model-path", str(target), "--dtype", "bfloat16", "--context-length", "2048"),
            *("--max-total-tokens", "16384", "--max-running-requests", str(running)),
            *("--sleep-on-idle", "--enable-metrics", *mode.flags),
        ]
        environment = {"OMP_NUM_THREADS": str(threads)} | dict(mode.environment)
        super().__init__(mode.name, arguments, log, environment)

    def generate(self, prompt: str, tokens: int) -> int:
        """Tokens of one greedy answer."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = json.loads(self._call("/generate", {"text": prompt, "sampling_params": sampling}))
        return answer["meta_info"]["completion_tokens"]

    def rate(self, prompts: list[str], concurrency: int, tokens: int) -> float:
        """Output tokens per second, prefill included, caches flushed first."""
        self._call("/flush_cache", {})
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            total = sum(pool.map(lambda prompt: self.generate(prompt, tokens), prompts))
        return total / (time.perf_counter() - start)

    def rounds(self) -> dict[str, float]:
        """Rounds by arm so far."""
        lines = self._call("/metrics").decode().splitlines()
        ours = [line for line in lines if line.startswith("ddtree_rounds_total{")]
        return {line.split('arm="')[1].split('"')[0]: float(line.split()[-1]) for line in ours}

    def _call(self, path: str, payload: dict[str, Any] | None = None) -> bytes:
        data = None if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.read()


def chat_prompts(path: Path, tokenizer: Any) -> list[str]:
    """`_PROMPTS` chat prompts, spread evenly over the file."""
    prompts = [p for p in read_prompts(path) if len(p.messages[0]["content"]) <= _LONGEST]
    return [
        tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts[:: max(1, len(prompts) // _PROMPTS)][:_PROMPTS]
    ]


def untrained_drafter(target: Path, like: Path, folder: Path) -> Path:
    """A drafter with the shipped one's shape and random weights."""
    from transformers import AutoModelForCausalLM

    from ddtree.drafter import random_drafter, save_drafter
    from ddtree.drafter.config import DFlashConfig

    shape = DFlashConfig.read(like)
    model = AutoModelForCausalLM.from_pretrained(target)
    bound = random_drafter(model, block_size=shape.block_size, num_layers=shape.num_hidden_layers)
    save_drafter(bound.model, bound.config, folder)
    return folder


@contextlib.contextmanager
def running(
    compared: list[Mode], target: Path, asked: argparse.Namespace, logs: Path
) -> Iterator[dict[Mode, Server]]:
    """A server per mode, all at once."""
    servers: dict[Mode, Server] = {}
    try:
        for mode in compared:
            log = logs / f"{mode.name}-{mode.drafter}.log"
            servers[mode] = Server(mode, target, max(asked.concurrency), asked.threads, log)
            servers[mode].start()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def measure(
    servers: dict[Mode, Server], name: str, prompts: list[str], asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rates of every mode on the prompts called `name`, taking turns, for every concurrency."""
    for concurrency in asked.concurrency:
        rates: dict[Mode, list[float]] = {mode: [] for mode in servers}
        for turn in range(max(_LEAST_TURNS, asked.answers // concurrency)):
            mine = [prompts[(turn * concurrency + i) % len(prompts)] for i in range(concurrency)]
            first = turn % len(servers)
            for mode in [*servers][first:] + [*servers][:first]:
                rates[mode].append(servers[mode].rate(mine, concurrency, asked.tokens))
            print(name, concurrency, turn, {f"{m.name} {m.drafter}": round(r[-1], 1)
                                            for m, r in rates.items()}, flush=True)  # fmt: skip
        for mode, server in servers.items():
            record = {
                "prompts": name, "mode": mode.name, "drafter": mode.drafter,
                "concurrency": concurrency, "tokens_per_second": rates[mode],
                "median": statistics.median(rates[mode]),
            }  # fmt: skip
            if mode.name == AUTO:
                rivals = {m.name: r for m, r in rates.items() if m != mode}
                record["over"] = {n: paired_ratio(rates[mode], r) for n, r in rivals.items()}
                record["over_best"] = paired_ratio(rates[mode], best_elsewhere([*rivals.values()]))
                record["rounds_so_far"] = server.rounds()
            yield record


def best_elsewhere(rates: list[list[float]]) -> list[float]:
    """By turn, the rate of the contender that is best, relative to its turn, in the other turns.

    Args:
        rates: by contender and turn.
    """
    table = np.array(rates)
    relative = table / np.median(table, axis=0)
    turns = range(table.shape[1])
    best = [np.median(np.delete(relative, turn, axis=1), axis=1).argmax() for turn in turns]
    return [float(table[row, turn]) for row, turn in zip(best, turns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="folder; the default target if unset")
    parser.add_argument("--drafter", type=Path, help="folder; the shipped one if unset")
    parser.add_argument("--widths", type=int, nargs="+", default=[9, 17, 33])
    parser.add_argument("--auto-width", type=int, default=33)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--answers", type=int, default=64, help="per mode and case")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()

    from transformers import AutoTokenizer

    from ddtree.drafter.shipped import shipped_drafter
    from ddtree.engine.default_target import prepare_default_target

    target = asked.target or prepare_default_target()
    shipped = asked.drafter or Path(shipped_drafter() or parser.error("no drafter is shipped"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = {path.name: chat_prompts(path, tokenizer) for path in asked.prompts}
    conditions = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads": asked.threads, "tokens": asked.tokens, "dtype": "bfloat16",
        "sglang": version("sglang"), "torch": version("torch"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, asked.out.open("w", encoding="utf-8") as out:
        drafters = {
            SHIPPED: shipped,
            UNTRAINED: untrained_drafter(target, shipped, Path(folder) / "untrained"),
        }
        for name, drafter in drafters.items():
            compared = modes(name, drafter, asked.widths, asked.auto_width)
            with running(compared, target, asked, Path(folder)) as servers:
                for server in servers.values():
                    server.rate(next(iter(prompts.values()))[:2], 2, 16)  # warm-up
                for file, texts in prompts.items():
                    for record in measure(servers, file, texts, asked):
                        print(json.dumps(record | conditions), file=out, flush=True)


if __name__ == "__main__":
    main()
