"""Commands in docs/deploy.md and deploy/ name options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sglang")

import typer

from ddtree.bench.cli import app as bench_app
from ddtree.sglang.serve import serve

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "docs" / "deploy.md", ROOT / "docs" / "benchmarks.md",
         *sorted((ROOT / "deploy").iterdir())]  # fmt: skip


def joined_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    one = typer.Typer()
    one.command()(serve)
    bench = typer.main.get_command(bench_app)
    return {
        "sglang": set(parser._option_string_actions),
        "serve": options_of(typer.main.get_command(one)),
        "run": options_of(bench.commands["run"]),
        "tables": options_of(bench.commands["tables"]),
    }


def options_of(command) -> set[str]:
    return {text for option in command.params for text in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_of_documented_commands_exist(path, known):
    for line in joined_lines(path):
        if line.startswith("SERVE_ARGUMENTS="):
            assert options(line) <= known["sglang"], line
        for command in ("run", "tables"):
            if f"ddtree bench {command} " in line:
                assert options(line.partition(f"ddtree bench {command}")[2]) <= known[command]
        if "ddtree serve --" in line:
            ours, _, theirs = line.partition("ddtree serve")[2].partition(" -- ")
            assert options(ours) <= known["serve"], line
            assert options(theirs) <= known["sglang"], line


def test_documents_hold_such_commands():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert text.count("ddtree serve --") >= 5
    assert text.count("ddtree bench run --") >= 2


def test_the_services_variables_are_in_its_environment_file():
    unit = (ROOT / "deploy" / "ddtree.service").read_text(encoding="utf-8")
    given = (ROOT / "deploy" / "ddtree.env").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?([A-Z_]+)", unit))
    assert used == {"SERVE_ARGUMENTS"} | set(re.findall(r"^(SERVE_[A-Z]+)=", given, re.MULTILINE))
