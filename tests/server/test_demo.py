"""`make demo`: six decoders of one prompt, three of them SGLang servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.drafter.shipped import shipped_drafter


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engine_and_servers_say_the_same(smollm2: Path, tmp_path: Path) -> None:
    """In fp32, token for token; and the trees are accepted."""
    if shipped_drafter() is None:
        pytest.skip("no drafter is shipped in models/")
    file = tmp_path / "demo.json"
    command = [sys.executable, "-c", "from ddtree.cli import app; app()", "demo", "-n", "40",
               "--dtype", "float32", "--json", str(file)]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.count("agree token for token") == 2
    record = json.loads(file.read_text(encoding="utf-8"))
    wanted = record["modes"]["ar"]["tokens"]
    assert {mode: one["token_ids"] for mode, one in record["servers"].items()} == dict.fromkeys(
        ("ar", "dflash", "ddtree"), wanted
    )
    assert record["servers"]["ddtree"]["tau"] > record["servers"]["dflash"]["tau"] > 1
