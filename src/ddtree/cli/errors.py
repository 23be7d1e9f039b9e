"""What a user did wrong, in one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

# Libraries that come with an extra of this distribution, and the extra that brings them.
_EXTRAS = {
    "transformers": "engine",
    "safetensors": "engine",
    "gguf": "engine",
    "accelerate": "engine",
    "tensorboard": "train",
    "sglang": "sglang",
    "matplotlib": "bench",
    "httpx": "bench",
}


class CommandError(Exception):
    """A command cannot do what was asked; the message names the value and the fix."""


class OneLineErrors(TyperGroup):
    """A command group that reports every mistake of its user in one line.

    Faults of the program keep their traceback.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        extra |= {"prog_name": "ddtree", "standalone_mode": False}
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            typer.secho("error: ", fg="red", err=True, nl=False)
            typer.echo(message, err=True)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def explain(error: Exception) -> str | None:
    """One line for a mistake of the user; None for a fault of the program."""
    if hasattr(error, "format_message"):  # wrong usage, found by the argument parser
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        message = error.format_message().replace("Value error, ", "")
        return _one_line(message.rstrip(".") + hint)
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return None
        return (
            f"{error.name} is not installed, and this command needs it; "
            f"run: pip install 'sglang-ddtree[{extra}]'"
        )
    # The package's own exceptions are written for its users.
    own = type(error).__module__.startswith("ddtree.")
    return _one_line(str(error)) if own else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
