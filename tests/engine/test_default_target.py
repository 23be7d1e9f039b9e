"""Preparing the default target: what is there stays, and whoever is second takes the first's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree.engine import default_target
from ddtree.engine.default_target import TargetPreparationError, prepare_default_target


def write_model(folder: Path, content: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(content)
    (folder / "model.safetensors").write_text(content)


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_target, "_download_gguf", lambda workdir: workdir / "model.gguf")


def test_two_processes_may_prepare_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "target"

    def convert(_gguf: Path, ready: Path) -> None:
        write_model(ready, "second")
        write_model(out, "first")  # what another process did meanwhile

    monkeypatch.setattr(default_target, "_convert", convert)
    assert prepare_default_target(out) == out
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert (out / "config.json").read_text() == "first"


def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_target, "_convert", lambda _, ready: write_model(ready, "own"))
    assert (prepare_default_target(tmp_path) / "config.json").read_text() == "own"


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(TargetPreparationError, match="does not hold"):
        prepare_default_target(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
