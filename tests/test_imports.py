"""Imports run one way, and importing the library costs no more than torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree

PACKAGE = Path(ddtree.__file__).parent
CORE = {"tree", "tree_cuda", "conditional", "constrained", "accept", "mask", "budget", "metrics",
        "cpu_linear", "delta"}  # fmt: skip
# What each part may import from the package; every part may import itself.
ALLOWED = {
    "core": {"core"},
    "drafter": {"core"},
    "engine": {"core", "drafter"},
    "sglang": {"core", "drafter", "engine"},
    "train": {"core", "drafter", "engine"},
    "bench": {"core", "drafter", "engine", "sglang", "train"},
    "cli": {"core", "drafter", "engine", "sglang", "train", "bench"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(name: str) -> str:
    return "core" if name in CORE else name


def imported(path: Path) -> set[str]:
    """Dotted names a file imports anywhere, relative imports resolved."""
    package = ["ddtree", *path.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = part_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    assert own in ALLOWED, f"{own} is not a part of the house: add it to architecture and here"
    names = imported(path)
    parts = {part_of(name.split(".")[1]) for name in names if name.startswith("ddtree.")}
    wrong = {part for part in parts & set(ALLOWED) if part not in ALLOWED[own] | {own}}
    assert not wrong
    if own == "core":
        third_party = top(names) - set(sys.stdlib_module_names) - {"ddtree", "torch"}
        assert third_party <= ({"triton"} if path.name == "tree_cuda.py" else set())
    if own != "sglang":
        assert "sglang" not in top(names)


def test_importing_the_library_loads_neither_transformers_nor_sglang() -> None:
    code = "import sys, ddtree; print(*{'transformers', 'sglang'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
