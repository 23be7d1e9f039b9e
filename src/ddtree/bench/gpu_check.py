"""What a machine with an NVIDIA GPU can tell about this project, in one JSON.

`scripts/gpu_check.sh` runs it. Each step ends as ``passed``, ``failed`` (with the reason) or
``not run`` (with the reason), and a failing step does not keep the others from running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import ddtree.tree as trees
from ddtree import SamplingRule, accept_path, build_tree, choose_tokens, generate
from ddtree.bench.machine import environment
from ddtree.drafter import load_drafter, random_drafter
from ddtree.drafter.shipped import shipped_drafter
from ddtree.engine import load_target
from ddtree.engine.default_target import prepare_default_target
from ddtree.mask import pack_bits, tree_attention_mask
from ddtree.tree import DraftTree

HORIZON = 15
# Separates rounding from faults (docs/structure.md, "Losslessness").
REGRET = 0.25
PROMPT = "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs are that in 3 weeks?"
_TESTS = ("tests/test_tree.py", "tests/test_tree_cuda.py", "tests/test_accept.py",
          "tests/test_mask.py", "tests/test_metrics.py", "tests/drafter")  # fmt: skip


class NotRunError(Exception):
    """A step cannot run here; the message says what is missing."""


class Check:
    """The steps, and what they share.

    Args:
        device: ``cuda`` or ``cpu``.
        target: folder or hub id; the default target when None.
        drafter: folder or hub id, ``random``, or the shipped one when None.
        vocab: columns of random logits.
        seconds: time spent on one timing.
    """

    def __init__(
        self, device: str, target: str | None, drafter: str | None, vocab: int, seconds: float
    ) -> None:
        self.device, self.vocab, self.seconds = device, vocab, seconds
        self._target, self._drafter = target, drafter

    def gpu(self) -> dict[str, Any]:
        """Name, memory, compute capability and driver of the GPU."""
        self._need_cuda()
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"sm_{properties.major}{properties.minor}",
            "cuda": torch.version.cuda,
        }

    def unit_tests(self) -> dict[str, Any]:
        """The library's tests; the Triton kernels' under Triton's interpreter."""
        root = Path(__file__).resolve().parents[3]
        if find_spec("pytest") is None or not (root / "tests").is_dir():
            raise NotRunError("pytest or the checkout's tests folder is missing")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", *_TESTS],
            cwd=root, capture_output=True, text=True, check=False,
        )  # fmt: skip
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        if done.returncode:
            raise AssertionError(f"{last}\n{done.stdout[-2000:]}")
        return {"pytest": last}

    def core_on_device(self) -> dict[str, Any]:
        """Trees, masks and walks on the device are those of the CPU, which the unit tests judge."""
        same = 0
        cases = [(b, n, d) for b in (1, 3, 16) for n in (1, 7, 32, 256) for d in _DTYPES]
        for seed, (batch, budget, dtype) in enumerate(cases):
            logits, roots = self._logits(batch, dtype, seed)
            here = build_tree(logits.cpu(), roots.cpu(), budget)
            there = build_tree(logits, roots, budget)
            same += _agree(here, there)
            # The rest starts from one tree, since near-ties may order two devices' differently.
            moved = _moved(here, self.device)
            assert torch.equal(moved.visibility().cpu(), here.visibility()), "visibility differs"
            scores = torch.randn(batch, budget + 1, 50, generator=_generator(seed))
            chosen = choose_tokens(scores, SamplingRule())
            assert torch.equal(chosen, choose_tokens(scores.to(self.device), SamplingRule()).cpu())
            # Half the targets are a child's token, so that walks are long.
            wanted = torch.where(chosen % 2 == 0, here.tokens.roll(-1, 1), chosen)
            walked, expected = accept_path(moved, wanted.to(self.device)), accept_path(here, wanted)
            assert torch.equal(walked.path.cpu(), expected.path), "the accepted paths differ"
            assert torch.equal(walked.next_tokens.cpu(), expected.next_tokens)
        return {"cases": len(cases), "identical_trees": same}

    def triton_builder(self) -> dict[str, Any]:
        """The Triton builder's trees against the torch builder's, both on the GPU."""
        self._need_cuda()
        if find_spec("triton") is None:
            raise NotRunError("Triton is not installed")
        cases = [(b, n, d) for b in (1, 8, 32) for n in (16, 64, 512) for d in _DTYPES]
        same = 0
        for seed, (batch, budget, dtype) in enumerate(cases):
            logits, roots = self._logits(batch, dtype, seed)
            ours = build_tree(logits, roots, budget)
            with _without_triton():
                same += _agree(build_tree(logits, roots, budget), ours)
        return {"cases": len(cases), "identical_trees": same}

    def reference_engine(self) -> dict[str, Any]:
        """bf16 decoding in three modes: tokens per second, tau, regret by a float32 forward."""
        folder = self._target or str(prepare_default_target())
        target, tokenizer = load_target(folder, dtype=torch.bfloat16, device=self.device)
        referee, _ = load_target(folder, dtype=torch.float32, device=self.device)
        drafter = self._load_drafter(target)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
        )
        found: dict[str, Any] = {}
        for mode, budget in (("ar", None), ("dflash", None), ("ddtree", 16), ("ddtree", 64)):
            options: dict[str, Any] = {"mode": mode, "budget": budget}
            generate(target, drafter, ids, max_new_tokens=8, **options)  # warm-up
            start = time.perf_counter()
            done = generate(target, drafter, ids, max_new_tokens=64, **options)
            seconds = time.perf_counter() - start
            found[mode if budget is None else f"{mode}:{budget}"] = {
                "tokens_per_second": round(len(done.tokens) / seconds, 1),
                "tau": round(done.tau, 3),
                "regret": round(_regret(referee, ids, done.tokens), 4),
                "stage_ms": {
                    name: round(s * 1e3 / max(len(done.accept_lengths), 1), 3)
                    for name, s in done.stage_seconds.items()
                },
            }
        # A target of wide logits rounds more coarsely; plain decoding shows how much.
        limit = max(REGRET, 2 * found["ar"]["regret"])
        worst = max(one["regret"] for one in found.values())
        assert worst <= limit, f"regret {worst} is above {limit}: {found}"
        return found

    def timings(self) -> list[dict[str, Any]]:
        """Milliseconds of building, masking and accepting by batch and budget."""
        rows: list[dict[str, Any]] = []
        for batch in (1, 8, 32):
            logits, roots = self._logits(batch, torch.bfloat16, batch)
            rows += [self._timing(logits, roots, budget) for budget in (16, 64, 256)]
        return rows

    def _timing(self, logits: Tensor, roots: Tensor, budget: int) -> dict[str, Any]:
        batch = len(roots)
        tree = build_tree(logits, roots, budget)
        prefix = torch.full((batch,), 1000, device=self.device)
        chosen = tree.tokens.roll(-1, 1)

        def mask() -> Tensor:
            return tree_attention_mask(tree.visibility(), tree.depths, prefix, 1024)

        def torch_build() -> DraftTree:
            with _without_triton():
                return build_tree(logits, roots, budget)

        functions: dict[str, Callable[[], Any]] = {
            "build": lambda: build_tree(logits, roots, budget),
            "torch_build": torch_build,
            "mask": mask,
            "packed_mask": lambda: pack_bits(tree.visibility()),
            "accept": lambda: accept_path(tree, chosen),
            "read_logits": lambda: logits.amax(-1),
        }
        row = {"batch": batch, "vocab": self.vocab, "horizon": HORIZON, "budget": budget}
        return row | {f"{n}_ms": round(self._milliseconds(f), 4) for n, f in functions.items()}

    def _milliseconds(self, function: Callable[[], Any]) -> float:
        """Median of repeated calls, each waited for."""
        times: list[float] = []
        deadline = time.perf_counter() + self.seconds
        while len(times) < 6 or time.perf_counter() < deadline:
            start = time.perf_counter()
            function()
            if self.device != "cpu":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[3:])  # the first calls compile

    def sglang(self) -> dict[str, Any]:
        """A short `ddtree bench run` of plain, DFLASH and DDTREE servers on the GPU."""
        self._need_cuda()
        if find_spec("sglang") is None:
            raise NotRunError("SGLang is not installed (pip install 'sglang-ddtree[sglang,bench]')")
        with tempfile.TemporaryDirectory() as folder:
            prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "run.jsonl"
            prompts.write_text("".join(json.dumps({"prompt": f"{n}. {PROMPT}"}) + "\n"
                                       for n in range(8)), encoding="utf-8")  # fmt: skip
            options = ["--prompts", str(prompts), "--out", str(out), "--logs", folder,
                       "--dtype", "bfloat16", "--one-at-a-time", "--block", "8"]  # fmt: skip
            options += ["--target", self._target] if self._target else []
            options += ["--drafter", self._drafter] if self._drafter else []
            code = "from ddtree.cli import app; app()"
            done = subprocess.run(
                [sys.executable, "-c", code, "bench", "run", *options],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode in (0, 1), done.stderr[-2000:]
            return {"lines": [json.loads(line) for line in out.read_text().splitlines()]}

    def _load_drafter(self, target: Any) -> Any:
        if self._drafter == "random":
            return random_drafter(target, block_size=8)
        folder = self._drafter or shipped_drafter()
        if folder is None:
            raise NotRunError("no drafter is shipped in this installation; name one with --drafter")
        return load_drafter(folder, target=target)

    def _need_cuda(self) -> None:
        if self.device != "cuda":
            raise NotRunError("no GPU")

    def _logits(self, batch: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
        """Peaked random logits [batch, HORIZON, vocab] and roots, the same on every device."""
        generator = _generator(seed)
        logits = torch.randn(batch, HORIZON, self.vocab, generator=generator) * 4
        roots = torch.randint(self.vocab, (batch,), generator=generator)
        return logits.to(self.device, dtype), roots.to(self.device)


_DTYPES = (torch.float32, torch.bfloat16)
STEPS = ("gpu", "unit_tests", "core_on_device", "triton_builder", "reference_engine", "timings",
         "sglang")  # fmt: skip


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _without_triton() -> Any:
    return patch.object(trees, "_triton_kernels", lambda device: None)


def _agree(expected: DraftTree, tree: DraftTree) -> bool:
    """Whether two trees are identical; raises if they are not even equally good."""
    tree.check()
    best = expected.scores.sort(1).values
    torch.testing.assert_close(tree.scores.sort(1).values.to(best.device), best,
                               rtol=1e-5, atol=1e-4)  # fmt: skip
    pairs = ((expected.tokens, tree.tokens), (expected.parents, tree.parents))
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def _moved(tree: DraftTree, device: str) -> DraftTree:
    fields = ("tokens", "parents", "depths", "scores", "valid")
    return replace(tree, **{name: getattr(tree, name).to(device) for name in fields})


@torch.inference_mode()
def _regret(referee: Any, ids: list[int], tokens: list[int]) -> float:
    """The largest distance of a token's logit from the best one."""
    whole = torch.tensor([ids + tokens], device=next(referee.parameters()).device)
    logits = referee(whole, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    chosen = logits.gather(1, whole[0, len(ids) :, None])[:, 0]
    return float((logits.amax(1) - chosen).max())


def run_steps(check: Check, steps: list[str]) -> dict[str, Any]:
    """Results by step, each with its state and seconds."""
    record: dict[str, Any] = {"kind": "gpu_check", "device": check.device, **environment()}
    for name in steps:
        print(f"{name} ...", flush=True)
        start = time.perf_counter()
        try:
            state: dict[str, Any] = {"state": "passed", "result": getattr(check, name)()}
        except NotRunError as reason:
            state = {"state": "not run", "reason": str(reason)}
        # Whatever goes wrong on a machine nobody has seen belongs into the record.
        except Exception as error:
            state = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        record[name] = state | {"seconds": round(time.perf_counter() - start, 1)}
        print(f"  {state['state']}{': ' + state['reason'] if 'reason' in state else ''}")
    return record


def main() -> int:
    """Run and write; 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--target", help="folder or hub id; the default target")
    parser.add_argument("--drafter", help="folder, hub id or 'random'; the shipped one")
    parser.add_argument("--vocab", type=int, default=151936, help="columns of random logits")
    parser.add_argument("--seconds", type=float, default=0.5, help="per timing")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no GPU: torch finds no CUDA device; the steps that need one are not run")
    check = Check(device, options.target, options.drafter, options.vocab, options.seconds)
    record = run_steps(check, options.steps)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"the record is in {options.json}")
    return int(any(record[name]["state"] == "failed" for name in options.steps))


if __name__ == "__main__":
    sys.exit(main())
