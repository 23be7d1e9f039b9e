"""Is `DDTREE_BUDGET=auto` ever slower than the best fixed way of decoding, or than plain?

One server per mode: plain, DFLASH, DDTREE at fixed widths and at a chosen one; then plain and a
chosen width with an untrained drafter. All are started first and sleep while they have nothing to
do; then the modes take turns (A B C A B C ...) for every concurrency, so that a noisy machine
disturbs all alike. One JSON line per prompt file, mode, drafter and concurrency: the median of
output tokens per second over the repetitions, and of auto's rate over each other mode's in the same
turn.

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

from ddtree.bench.process import ServerProcess
from ddtree.train.prompts import read_prompts

SHIPPED, UNTRAINED = "shipped", "untrained"
AUTO = "auto"
_PROMPTS = 64
_LEAST = 4  # answers in a turn; the rate of a single one is mostly noise
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
) -> list[dict[str, Any]]:
    """Rates of every mode on the prompts called `name`, taking turns, for every concurrency."""
    records = []
    for concurrency in asked.concurrency:
        rates: dict[Mode, list[float]] = {mode: [] for mode in servers}
        for turn in range(asked.repetitions):
            for mode, server in servers.items():
                count = max(asked.requests * concurrency, _LEAST)
                mine = [prompts[(turn * count + i) % len(prompts)] for i in range(count)]
                rates[mode].append(server.rate(mine, concurrency, asked.tokens))
            print(name, concurrency, turn, {f"{m.name} {m.drafter}": round(r[-1], 1)
                                            for m, r in rates.items()}, flush=True)  # fmt: skip
        records += [
            {"prompts": name} | _record(mode, concurrency, rates, server)
            for mode, server in servers.items()
        ]
    return records


def _record(
    mode: Mode, concurrency: int, rates: dict[Mode, list[float]], server: Server
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "mode": mode.name, "drafter": mode.drafter, "concurrency": concurrency,
        "tokens_per_second": rates[mode], "median": statistics.median(rates[mode]),
    }  # fmt: skip
    if mode.name == AUTO:
        rivals = [m for m in rates if m != mode]
        record["over"] = {
            rival.name: statistics.median(
                mine / theirs for mine, theirs in zip(rates[mode], rates[rival], strict=True)
            )
            for rival in rivals
        }
        best = max(statistics.median(rates[rival]) for rival in rivals)
        record["over_best"] = record["median"] / best
        record["rounds_so_far"] = server.rounds()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="folder; the default target if unset")
    parser.add_argument("--drafter", type=Path, help="folder; the shipped one if unset")
    parser.add_argument("--widths", type=int, nargs="+", default=[9, 17, 33])
    parser.add_argument("--auto-width", type=int, default=33)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=2, help="per client and turn")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()

    from transformers import AutoTokenizer

    from ddtree.drafter.shipped import shipped_drafter
    from ddtree.engine.default_target import prepare_default_target

    target = asked.target or prepare_default_target()
    shipped = asked.drafter or Path(shipped_drafter() or parser.error("no drafter is shipped"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = {path.name: chat_prompts(path, tokenizer) for path in asked.prompts}
    with tempfile.TemporaryDirectory() as folder:
        drafters = {
            SHIPPED: shipped,
            UNTRAINED: untrained_drafter(target, shipped, Path(folder) / "untrained"),
        }
        records = []
        for name, drafter in drafters.items():
            compared = modes(name, drafter, asked.widths, asked.auto_width)
            with running(compared, target, asked, Path(folder)) as servers:
                for server in servers.values():
                    server.rate(next(iter(prompts.values()))[:2], 2, 16)  # warm-up
                for file, texts in prompts.items():
                    records += measure(servers, file, texts, asked)
    conditions = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads": asked.threads, "tokens": asked.tokens, "requests": asked.requests,
        "repetitions": asked.repetitions, "dtype": "bfloat16",
        "sglang": version("sglang"), "torch": version("torch"),
    }  # fmt: skip
    with asked.out.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record | conditions) + "\n")


if __name__ == "__main__":
    main()
