"""`ddtree bench run` on the reference engine, and what needs no server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ddtree
from ddtree.bench.plan import Cell, Contender, Plan
from ddtree.bench.prompts import load_prompts
from ddtree.bench.reference import Models, ReferenceBackend
from ddtree.bench.results import read_run
from ddtree.cli import app


def bench(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_engine_is_measured_and_reported(tiny_pair, tmp_path):
    out, page = tmp_path / "run.jsonl", tmp_path / "report.html"
    result = bench(
        *("run", "--engine", "reference", "--prompts", tiny_pair.prompts, "--limit", 3),
        *("--target", tiny_pair.target, "--drafter", tiny_pair.drafter, "--dtype", "float32"),
        *("--budgets", "9,60", "--temperature", "0,1", "-n", 16, "--ignore-eos"),
        *("--out", out, "--report", page),
    )
    assert result.exit_code == 0, result.output
    run = read_run(out)
    assert [one["label"] for one in run.header["contenders"]] == [
        "ar", "dflash", "ddtree:9", "ddtree:60",
    ]  # fmt: skip
    assert run.header["versions"]["torch"] == torch.__version__
    for greedy, rows in zip((True, False), run.cells().values(), strict=True):
        assert rows[0].cell.greedy is greedy
        assert [row.verdict.passed for row in rows] == [None, True, True, True]
        for row in rows:
            assert [tokens for _, tokens, _ in row.visits] == [16, 16, 16]
            # Every token but the prefill's is committed by a round.
            assert sum(n * rounds for n, rounds in row.histogram.items()) == 3 * 15
            assert row.ledger["verify"] > 0
            assert ("draft" in row.ledger) == (row.contender != "ar")
        taus = [row.tau for row in rows]
        assert taus[0] == 1
        if greedy:  # a larger tree holds a smaller one
            assert taus[3] >= taus[2]
    assert "plot-speedup" in page.read_text(encoding="utf-8")
    again = tmp_path / "again.html"
    assert bench("report", out, "--out", again).exit_code == 0
    assert again.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_regrets_are_distances_to_the_best_logit_of_a_plain_forward(tiny_pair):
    models = Models(str(tiny_pair.target), None, "float32", "cpu")
    prompts = load_prompts(str(tiny_pair.prompts))
    backend = ReferenceBackend(Contender("ar", "ar"), prompts, models)
    (answer,) = backend.ask([1], Cell(), Plan(max_new_tokens=12, ignore_eos=True)).answers
    assert max(backend.regrets(1, answer.tokens, Cell())) == pytest.approx(0, abs=1e-4)

    wrong = [*answer.tokens[:4], (answer.tokens[4] + 1) % 300, *answer.tokens[5:]]
    ids = models.tokenizer.apply_chat_template(
        list(prompts[1].messages), add_generation_prompt=True, return_dict=False
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([ids + wrong])).logits[0].log_softmax(-1)
    expected = [
        float(logits[len(ids) - 1 + i].max() - logits[len(ids) - 1 + i, token])
        for i, token in enumerate(wrong)
    ]
    assert backend.regrets(1, wrong, Cell()) == pytest.approx(expected, abs=1e-3)
    assert expected[4] > 0.5


REFUSED = {
    "concurrency without servers": (["--concurrency", "2"], "one request at a time"),
    "thinking the template has not": (["--thinking", "on"], "enable_thinking"),
    "server settings": (["--contender", "x=ddtree:4 --page-size 2"], "server settings"),
    "an unknown mode": (["--modes", "ar,beam"], "beam"),
    "no number": (["--budgets", "8,x"], "8,x"),
    "an unknown dtype": (["--dtype", "int8"], "int8"),
    "an unknown gate": (["--gate", "maybe"], "--gate"),
    "a report in no folder": (["--report", "no/r.html"], "no folder no"),
    "prompts that are not there": (["--prompts", "gsm9k"], "gsm8k, math500"),
    "an endpoint nobody serves": (["--endpoint", "a=http://127.0.0.1:9"], "127.0.0.1:9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_gets_one_line(case, tiny_pair, tmp_path):
    arguments, named = REFUSED[case]
    result = bench(
        *("run", "--engine", "reference", "--prompts", tiny_pair.prompts, "--limit", 1, "-n", 2),
        *("--target", tiny_pair.target, "--drafter", tiny_pair.drafter),
        *("--out", tmp_path / "run.jsonl", *arguments),
    )
    assert result.exit_code == 2, result.output
    last = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1, result.stderr
    assert named in last[0]


@pytest.mark.parametrize("name", ["gsm8k", "spec-bench"])
def test_named_prompts_without_a_network_are_an_error_and_not_a_traceback(name, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    source = str(Path(ddtree.__file__).parents[1])
    command = [sys.executable, "-c", "from ddtree.cli import app; app()", "bench", "run",
               "--prompts", name, "--out", str(tmp_path / "run.jsonl")]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | offline | {"PYTHONPATH": source}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert f"the prompts {name} cannot be fetched" in last
    assert "JSONL" in last
