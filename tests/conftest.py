"""Shared fixtures: where data and the default target are, and the `--slow` switch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the full-size studies")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="a full-size study: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the prompt files; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the prompt files (../shared/data) are not beside this checkout")
    return SHARED_DATA


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder with the default target, prepared on first use and cached."""
    pytest.importorskip("transformers")
    from ddtree.engine.default_target import TargetPreparationError, prepare_default_target

    try:
        return prepare_default_target()
    except TargetPreparationError as error:
        pytest.skip(f"the default target cannot be prepared here: {error}")


def read_jsonl(path: Path, limit: int | None = None) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(limit or 10**9), lines, strict=False)]
