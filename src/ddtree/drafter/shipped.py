"""Where this repository keeps the drafter it ships for the default target."""

from __future__ import annotations

from pathlib import Path

from ddtree.drafter.config import CONFIG_FILE

NAME = "smollm2-135m-dflash"


def shipped_drafter() -> Path | None:
    """Folder of the drafter trained for the default target; None where it is not present."""
    folder = Path(__file__).resolve().parents[3] / "models" / NAME
    return folder if (folder / CONFIG_FILE).is_file() else None
