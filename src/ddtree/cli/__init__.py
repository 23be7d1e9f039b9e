"""The command ``ddtree``."""

from __future__ import annotations

import sys

try:
    from ddtree.cli.main import app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise

    def app() -> None:  # type: ignore[misc]
        """Stand in for the command line where its libraries are not installed."""
        print(
            "error: the command line needs typer and rich; "
            "run: pip install 'sglang-ddtree[engine]'",
            file=sys.stderr,
        )
        raise SystemExit(2)


__all__ = ["app"]
