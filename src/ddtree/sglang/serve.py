"""`ddtree serve`: SGLang's own launch with first-class names and the default model filled in."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated

import typer

# What a laptop serves comfortably; on an accelerator SGLang sizes itself.
_CPU_ARGUMENTS = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--sleep-on-idle")
# With this budget the server chooses the width of every round, up to so many drafted nodes.
_AUTO, _AUTO_NODES = "auto", 32
# On an accelerator every round has the launch width.
_NODES = "16"
# What the script `sglang` runs; the script itself need not be on the path.
SGLANG_COMMAND = "from sglang.cli.main import main; main()"


class Mode(StrEnum):
    """How the server decodes."""

    DDTREE = "ddtree"
    DFLASH = "dflash"
    AR = "ar"


def launch_arguments(
    *,
    target: str,
    drafter: str | None,
    mode: Mode,
    budget: int,
    block_size: int | None,
    dtype: str,
    extra: list[str],
) -> list[str]:
    """Arguments of `sglang serve` for these choices; `extra` comes last and wins."""
    arguments = ["--model-path", target, "--dtype", dtype]
    if not _accelerated():
        arguments += _CPU_ARGUMENTS
    if mode is Mode.AR:
        return arguments + extra
    assert drafter is not None, "a speculative mode needs a drafter"
    arguments += ["--speculative-algorithm", mode.name, "--speculative-draft-model-path", drafter]
    if mode is Mode.DDTREE:
        arguments += ["--speculative-num-draft-tokens", str(budget + 1)]
    if block_size is not None:
        arguments += ["--speculative-dflash-block-size", str(block_size)]
    return arguments + extra


def _accelerated() -> bool:
    import torch

    return torch.accelerator.is_available()


def _check_budget(budget: str | None) -> str:
    if budget is None:
        return _NODES if _accelerated() else _AUTO
    if budget != _AUTO and not (budget.isdecimal() and int(budget) >= 1):
        raise typer.BadParameter(f"{budget!r} is neither auto nor a whole number of 1 or more")
    return budget


def serve(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="Target folder or hub id; SmolLM2-135M-Instruct if unset.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="DFlash drafter folder or hub id; the shipped one if unset.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="ddtree, dflash or ar (plain decoding).")
    ] = Mode.DDTREE,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Drafted nodes per tree, or auto: chosen every round, up to 32. Unset: 16 on an "
            "accelerator, auto elsewhere.",
            callback=_check_budget,
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=2, help="Slots of a draft block; the drafter's if unset.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
) -> None:
    """Serve a model with SGLang; further SGLang flags go after `--`."""
    if find_spec("sglang") is None:
        raise typer.BadParameter("SGLang is not installed: pip install 'sglang-ddtree[sglang]'")
    if drafter is None and mode is not Mode.AR:
        drafter = _shipped_drafter(target)
    if target is None:
        from ddtree.engine.default_target import prepare_default_target

        target = str(prepare_default_target())
    assert budget is not None, "filled in by its callback"
    arguments = launch_arguments(
        target=target,
        drafter=drafter,
        mode=mode,
        budget=_AUTO_NODES if budget == _AUTO else int(budget),
        block_size=block_size,
        dtype=dtype,
        extra=["--host", host, "--port", str(port), *context.args],
    )
    typer.echo(_first_request(host, port))
    if budget == _AUTO:
        os.environ["DDTREE_BUDGET"] = _AUTO
    # Replace this process, so that signals and exit codes are the server's own.
    command = [sys.executable, "-c", SGLANG_COMMAND, "serve", *arguments]
    os.execv(sys.executable, command)


def _shipped_drafter(target: str | None) -> str:
    from ddtree.drafter.shipped import shipped_drafter

    shipped = shipped_drafter() if target is None else None
    if shipped is None:
        whose = f"the target {target}" if target else "the default target in this installation"
        raise typer.BadParameter(
            f"no drafter is shipped for {whose}; name one with --drafter, or use --mode ar for none"
        )
    return str(shipped)


def _first_request(host: str, port: int) -> str:
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello!"}]}'
    return (
        "When the server says it is ready, try:\n"
        f"  curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )
