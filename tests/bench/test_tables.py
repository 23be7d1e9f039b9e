"""Every figure in the documents is the stored results' figure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ddtree.bench.plan import BenchError, cells
from ddtree.bench.tables import KINDS, regenerate
from ddtree.cli import app

from .test_results import four, stored_run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_match_the_stored_results(document):
    text = document.read_text(encoding="utf-8")
    assert "<!-- stored:" in text
    assert text.count("<!-- stored:") == text.count("<!-- /stored -->")
    assert regenerate(text, RESULTS) == text, (
        f"run: ddtree bench tables {document.relative_to(ROOT)}"
    )


@pytest.mark.parametrize("file", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_stored_results_are_small_and_say_where_they_come_from(file):
    assert file.stat().st_size < 200_000
    text = file.read_text(encoding="utf-8")
    for line in text.splitlines():
        json.loads(line)
    assert not re.search(r'"/(home|root|work|tmp|usr)\b', text), "a path of some machine"
    assert file.name in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    stored_run(folder / "run.jsonl", four(), cells([1, 2], [0.0], [None]))
    return folder


def test_the_command_fills_in_and_then_finds_nothing_to_do(results, tmp_path):
    document = tmp_path / "doc.md"
    document.write_text(
        "# A\n<!-- stored: bench run.jsonl -->\n<!-- /stored -->\nand "
        "<!-- stored: speedup run.jsonl ddtree:8 -->?<!-- /stored --> times\n"
    )
    command = ["bench", "tables", str(document), "--results", str(results)]
    assert CliRunner().invoke(app, [*command, "--check"]).exit_code == 1
    assert CliRunner().invoke(app, command).exit_code == 0
    text = document.read_text()
    assert "-->1.80<!-- /stored --> times" in text
    assert "| ddtree:32 | 80.0 | 1.60 (1.60\u20131.60) | 4.00 |" in text
    assert CliRunner().invoke(app, [*command, "--check"]).exit_code == 0
    document.write_text(text.replace("1.80<", "2.80<"))
    assert CliRunner().invoke(app, [*command, "--check"]).exit_code == 1


def test_a_missing_run_is_said_to_be_missing(results):
    text = "<!-- stored: bench gone.jsonl -->old figures<!-- /stored -->"
    assert regenerate(text, results) == text.replace("old figures", "*no stored run: gone.jsonl*")


@pytest.mark.parametrize("marker", ["speedup", "poem run.jsonl", "speedup run.jsonl nobody"])
def test_a_marker_that_asks_for_nothing_known_is_refused(marker, results):
    with pytest.raises(BenchError):
        regenerate(f"<!-- stored: {marker} -->x<!-- /stored -->", results)


def test_every_kind_is_used_in_a_document():
    used = {
        word
        for document in DOCUMENTS
        for word in re.findall(r"<!-- stored: (\S+)", document.read_text(encoding="utf-8"))
    }
    assert used == set(KINDS)
