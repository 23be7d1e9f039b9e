"""docs/support.md claims nothing without a test, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
# Cells of a row that claim nothing.
MODEST = ("not run", "*not run*", "refused", "no graphs on a CPU", "in part", "this page")


def rows() -> list[list[str]]:
    """Cells of every row of every table of features."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    found, inside = [], False
    for row in cells:
        if row[-1] == "Tested by":
            inside = True
        elif row[-1] in ("Default",):
            inside = False
        elif inside and set(row[0]) != {"-"}:
            found.append(row)
    return found


def test_the_page_has_rows() -> None:
    assert len(rows()) > 30


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_claim_links_to_a_test_that_exists(row: list[str]) -> None:
    claims = [cell for cell in row[1:-1] if not cell.startswith(MODEST)]
    links = LINK.findall(row[-1])
    assert links or not claims or row[-1] in ("the same", "this page"), "a claim without a test"
    for names, path in links:
        file = (PAGE.parent / path).resolve()
        assert file.is_file(), path
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"test_\w+(?!\w*\.py)", names):
            known = f"def {name}(" in text or file.stem == name
            assert known, f"{path} has no {name}"
