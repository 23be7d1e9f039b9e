"""`scripts/gpu_check.sh`, as far as a machine without a GPU can run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from ddtree.bench.gpu_check import Check, run_steps

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_without_a_gpu_it_runs_to_the_end_and_says_so(tiny_pair, tmp_path):
    file = tmp_path / "check.json"
    options = ["--json", file, "--target", tiny_pair.target, "--drafter", tiny_pair.drafter,
               "--vocab", "5000", "--seconds", "0.01", "--steps", "gpu", "core_on_device",
               "triton_builder", "reference_engine", "timings", "sglang"]  # fmt: skip
    done = subprocess.run(
        [SCRIPT, *map(str, options)], env=os.environ | {"PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU" in done.stdout
    record = json.loads(file.read_text(encoding="utf-8"))
    states = {name: one["state"] for name, one in record.items() if "state" in (one or ())}
    assert states == {
        "gpu": "not run",
        "core_on_device": "passed",
        "triton_builder": "not run",
        "reference_engine": "passed",
        "timings": "passed",
        "sglang": "not run",
    }
    assert record["triton_builder"]["reason"] == "no GPU"
    core = record["core_on_device"]["result"]
    assert core["identical_trees"] == core["cases"]
    timings = record["timings"]["result"]
    assert {(row["batch"], row["budget"]) for row in timings} == {
        (b, n) for b in (1, 8, 32) for n in (16, 64, 256)
    }
    assert all(row[f"{name}_ms"] > 0 for row in timings for name in ("build", "mask", "accept"))


def test_a_step_that_fails_is_recorded_and_the_next_one_runs(monkeypatch):
    def broken(self):
        raise AssertionError("the trees differ")

    monkeypatch.setattr(Check, "core_on_device", broken)
    record = run_steps(Check("cpu", None, None, 500, 0.0), ["core_on_device", "timings"])
    assert record["core_on_device"]["state"] == "failed"
    assert "the trees differ" in record["core_on_device"]["reason"]
    assert record["timings"]["state"] == "passed"


def test_regret_above_the_limit_fails(monkeypatch, tiny_pair):
    regrets = iter([0.1, 0.1, 2.0, 0.1])
    monkeypatch.setattr("ddtree.bench.gpu_check._regret", lambda *arguments: next(regrets))
    check = Check("cpu", str(tiny_pair.target), "random", 500, 0.0)
    record = run_steps(check, ["reference_engine"])
    assert record["reference_engine"]["state"] == "failed"
    assert "2.0 is above 0.25" in record["reference_engine"]["reason"]
