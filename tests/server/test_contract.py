"""The list of upstream names, the environment settings and the arguments of `ddtree serve`."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.sglang.settings import Settings


def test_the_installed_release_has_every_name_the_plugin_touches() -> None:
    pytest.importorskip("sglang")
    from ddtree.sglang.compat import check_installed_release

    check_installed_release()


def test_the_cpu_platforms_operators_pass_the_same_check() -> None:
    """A replacement keeps the names the check reads; in a process of its own, which it changes."""
    pytest.importorskip("sglang")
    code = (
        "from ddtree.sglang.cpu.operators import install_torch_operators as install\n"
        "from ddtree.sglang.compat import check_installed_release as check\n"
        "install(); check()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_moved_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from ddtree.sglang import compat

    moved = {
        "sglang.srt.runtime_context:get_spec_that_moved": (),
        "sglang.srt.speculative.spec_utils:draft_tp_context": ("layout", "another"),
    }
    monkeypatch.setattr(compat, "TOUCHPOINTS", moved)
    with pytest.raises(compat.IncompatibleRelease) as failure:
        compat.check_installed_release()
    message = str(failure.value)
    assert "get_spec_that_moved is missing" in message
    assert "draft_tp_context has no 'another'" in message
    assert "0.5.23" in message


def test_every_import_of_upstream_names_is_on_the_list() -> None:
    """Names imported from SGLang at the top of the worker's modules, apart from plain types."""
    pytest.importorskip("sglang")
    from ddtree.sglang import compat

    listed = {name.partition(":")[2].partition(".")[0] for name in compat.TOUCHPOINTS}
    package = Path(compat.__file__).parent
    imported = set()
    for module in ("worker", "choose", "verify", "penalties"):
        text = (package / f"{module}.py").read_text(encoding="utf-8")
        for names in re.findall(r"^from sglang\S* import (?:\(([^)]*)\)|(.*))$", text, re.M):
            imported |= {name.strip() for name in "".join(names).split(",") if name.strip()}
    types = {
        *("LogitsProcessorOutput", "ScheduleBatch", "Req", "ServerArgs", "TpModelWorker"),
        *("SamplingPrewarmResult", "SpeculativeAlgorithm"),
    }
    assert imported - types <= listed


@pytest.mark.parametrize(
    ("name", "value"),
    [("DDTREE_CHAIN_SEED", "maybe"), ("DDTREE_LOG_ROUNDS", "-3"), ("DDTREE_BUDGET", "12")],
)
def test_a_wrong_setting_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_environment({name: value})


def test_settings() -> None:
    assert Settings.from_environment({}) == Settings("fixed", chain_seed=False, log_rounds=0)
    assert Settings.from_environment({"DDTREE_BUDGET": "auto"}).budget == "auto"
    with pytest.raises(ValueError, match="set one of them only"):
        Settings.from_environment({"DDTREE_BUDGET": "auto", "DDTREE_CHAIN_SEED": "1"})
    chosen = Settings.from_environment({"DDTREE_CHAIN_SEED": "1", "DDTREE_LOG_ROUNDS": "50"})
    assert chosen == Settings(chain_seed=True, log_rounds=50)


def test_serve_fills_in_sglangs_flags() -> None:
    pytest.importorskip("typer")
    from ddtree.sglang.serve import Mode, launch_arguments

    arguments = launch_arguments(
        target="T",
        drafter="D",
        mode=Mode.DDTREE,
        budget=16,
        block_size=8,
        dtype="auto",
        extra=["--page-size", "16"],
    )
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--speculative-algorithm"] == "DDTREE"
    assert pairs["--speculative-num-draft-tokens"] == "17"
    assert pairs["--speculative-dflash-block-size"] == "8"
    assert arguments[-2:] == ["--page-size", "16"]


@pytest.mark.parametrize(
    ("accelerated", "asked", "width", "budget"),
    [(False, [], 33, "auto"), (True, [], 17, "fixed"), (False, ["--budget", "8"], 9, "fixed")],
)
def test_serve_chooses_widths_itself_unless_told_or_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool, asked: list[str], width: int, budget: str
) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from ddtree.cli import app
    from ddtree.sglang import serve

    launched: list[str] = []
    monkeypatch.setenv("DDTREE_BUDGET", "fixed")
    monkeypatch.setattr(serve, "_accelerated", lambda: accelerated)
    monkeypatch.setattr(serve.os, "execv", lambda _path, command: launched.extend(command))
    CliRunner().invoke(app, ["serve", "--target", "T", "--drafter", "D", *asked])
    assert launched[launched.index("--speculative-num-draft-tokens") + 1] == str(width)
    assert os.environ["DDTREE_BUDGET"] == budget
