"""Stored runs: figures computed from them, and their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

import numpy as np
from scipy import stats

from ddtree.bench.measure import measure
from ddtree.bench.plan import BenchError, Plan, cells
from ddtree.bench.results import (
    paired_ratio,
    percentiles,
    read_run,
    stored_line,
    summarise,
    write_line,
)

from .scripted import Scripted, counting


def header(backends):
    return {
        "kind": "run", "started": "2026-01-02T03:04:05+00:00", "commit": "abc",
        "versions": {"torch": "2.9", "sglang": "0.5.23"},
        "hardware": {"cpu": "Example <CPU>", "cores": 2, "instructions": ["amx_bf16"],
                     "memory_gib": 24, "gpus": [], "threads": 1, "load_at_start": 0.1},
        "settings": {"prompts": "gsm8k.jsonl", "count": 8, "engine": "sglang", "dtype": "float32",
                     "target": "SmolLM2-135M-Instruct", "drafter": "smollm2-135m-dflash"},
        "plan": {"max_new_tokens": 8, "ignore_eos": True, "gate": "auto", "epsilon": 0.5},
        "contenders": [{"label": b.contender.label, "mode": b.contender.mode,
                        "budget": b.contender.budget} for b in backends],
    }  # fmt: skip


def stored_run(path: Path, backends, conditions, prompts=8, **plan):
    write_line(path, header(backends), first=True)
    for results in measure(backends, conditions, prompts, Plan(**plan)):
        for result in results:
            write_line(path, stored_line(result))
    return read_run(path)


def four(script=counting):
    calls: list = []
    return [
        Scripted("ar", calls, rate=50),
        Scripted("dflash", calls, rate=70, committed=2),
        Scripted("ddtree:8", calls, rate=90, budget=8, committed=3),
        Scripted("ddtree:32", calls, rate=80, budget=32, committed=4, script=script),
    ]


def test_a_run_read_back_gives_the_figures_of_what_was_measured(tmp_path):
    conditions = cells([1, 2], [0.0, 1.0], [None])
    run = stored_run(tmp_path / "run.jsonl", four(), conditions)
    summary = summarise(run)
    assert list(summary) == conditions
    for rows in summary.values():
        assert [row.rate for row in rows] == pytest.approx([50, 70, 90, 80], rel=1e-4)
        assert [row.speedup[0] for row in rows] == pytest.approx([1, 1.4, 1.8, 1.6], rel=1e-4)
        assert [row.stored.tau for row in rows] == [1, 2, 3, 4]
        assert rows[2].first_ms == pytest.approx([1000 / 90] * 3, abs=0.1)
        assert rows[2].token_ms == pytest.approx([1000 / 90] * 3, abs=0.01)
        assert rows[2].stored.ledger == {"draft": 2.0, "verify": 10.0}


def test_refused_outputs_get_no_speed_up(tmp_path):
    backends = four(script=lambda prompt, cell: [0] * 8)
    run = stored_run(tmp_path / "run.jsonl", backends, cells([1], [0.0], [None]))
    (rows,) = summarise(run).values()
    assert [row.refused for row in rows] == [False, False, False, True]
    assert rows[3].speedup is None
    assert "not compared" in rows[3].cells(baseline=False)


def test_the_interval_is_the_paired_bootstrap_of_the_median_ratio():
    rng = np.random.default_rng(3)
    base = rng.lognormal(3, 0.5, 40)  # the machine's mood, shared by a pair
    fast = base * rng.normal(1.5, 0.1, 40)
    ratio, low, high = paired_ratio(fast.tolist(), base.tolist())
    theirs = stats.bootstrap(
        (fast / base,), np.median, method="percentile", n_resamples=5000, random_state=1
    ).confidence_interval
    assert ratio == pytest.approx(np.median(fast / base))
    assert (low, high) == pytest.approx(tuple(theirs), abs=0.02)
    assert high - low < 0.2, "pairing takes the mood out"


def test_percentiles_ignore_what_is_unknown():
    assert percentiles([None, *range(101)]) == (50, 90, 99)
    assert percentiles([None]) == ()


def test_a_thousand_requests_stay_small(tmp_path):
    path = tmp_path / "run.jsonl"
    stored_run(path, four(), cells([1, 2, 4, 8], [0.0], [None]), prompts=64)
    assert path.stat().st_size < 100_000
    assert sum(len(json.loads(line)["first_ms"])
               for line in path.read_text().splitlines()[1:]) == 1024  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", '{"kind": "run"}\n', '{"benchmark": "x"}\n'])
def test_a_file_that_is_no_run_is_refused(text, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"run\.jsonl"):
        read_run(path)
