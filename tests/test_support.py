"""docs/support.md claims nothing without a test, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
# Cells of a row that claim nothing.
MODEST = ("n/a", "not offered", "not run", "*not run*", "refused", "no graphs on a CPU", "in part")


COLUMNS = ("Reference engine", "Server on CPU", "Server on CUDA")


def rows() -> list[dict[str, str]]:
    """Every row of every table of features, by column; the first one is under ``""``."""
    found: list[dict[str, str]] = []
    head: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line[:1] != "|":
            head = []
        elif not head:
            head = ["", *cells[1:]]
        elif "Tested by" in head and set(cells[0]) != {"-"}:
            found.append(dict(zip(head, cells, strict=True)))
    return found


def test_the_page_has_rows() -> None:
    assert len(rows()) > 45


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[""][:40])
def test_a_row_says_something_of_every_engine(row: dict[str, str]) -> None:
    assert all(row[column] for column in COLUMNS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[""][:40])
def test_a_claim_links_to_a_test_that_exists(row: dict[str, str]) -> None:
    """And to one of the right kind: server tests start servers, and no others do."""
    claimed = [column for column in COLUMNS if not row[column].startswith(MODEST)]
    tested = row["Tested by"]
    links = LINK.findall(tested)
    for names, path in links:
        file = (PAGE.parent / path).resolve()
        assert file.is_file(), path
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"test_\w+(?!\w*\.py)", names):
            known = f"def {name}(" in text or file.stem == name
            assert known, f"{path} has no {name}"
    if tested in ("the same", "this page"):
        return
    for column in claimed:
        served = column.startswith("Server")
        # Tests of the reference engine against the server are tests of both.
        fitting = [path for names, path in links if "/server/" in path or not served]
        assert fitting, f"{column} is claimed without a test"
