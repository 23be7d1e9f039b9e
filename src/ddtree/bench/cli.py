"""`ddtree bench`: run, report, tables."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ddtree.bench.answers import Backend
from ddtree.bench.plan import (
    BenchError,
    Cell,
    Contender,
    Plan,
    cells,
    contenders,
    endpoints,
)

app = typer.Typer(help="Measure, compare, report.", no_args_is_help=True)
_console = Console()


class Engine(StrEnum):
    """What decodes."""

    SGLANG = "sglang"
    REFERENCE = "reference"


class Thinking(StrEnum):
    """The chat template's `enable_thinking`."""

    DEFAULT = "default"
    ON = "on"
    OFF = "off"
    BOTH = "both"


_THINKING: dict[str, list[bool | None]] = {
    "default": [None],
    "on": [True],
    "off": [False],
    "both": [False, True],
}


class Gate(StrEnum):
    """What greedy outputs must satisfy before speeds are compared."""

    AUTO = "auto"
    EQUAL = "equal"
    REGRET = "regret"
    NONE = "none"


@app.command()
def run(
    prompts: Annotated[
        str,
        typer.Option(
            help="JSONL file, or one of gsm8k, math500, humaneval, mbpp, mt-bench, spec-bench."
        ),
    ],
    out: Annotated[Path, typer.Option(help="JSONL of the run; replaced.")],
    report: Annotated[Path | None, typer.Option(help="Also write the HTML report here.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take.")] = 32,
    engine: Annotated[
        Engine, typer.Option(help="Start SGLang servers, or use the reference engine.")
    ] = Engine.SGLANG,
    endpoint: Annotated[
        list[str], typer.Option(help="Running server, LABEL=URL; the first is the baseline.")
    ] = [],  # noqa: B006
    modes: Annotated[str, typer.Option(help="The first is the baseline.")] = "ar,dflash,ddtree",
    budgets: Annotated[str, typer.Option(help="Drafted nodes of each ddtree.")] = "8,16,32",
    contender: Annotated[
        list[str],
        typer.Option(help="One more: 'LABEL=MODE[:BUDGET] [NAME=VALUE ...] [--flag ...]'."),
    ] = [],  # noqa: B006
    target: Annotated[
        str | None, typer.Option(help="Target folder or hub id; SmolLM2-135M-Instruct if unset.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter folder or hub id; the shipped one if unset.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="Device of the reference engine.")] = "cpu",
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0",
    thinking: Annotated[Thinking, typer.Option(help="The template's.")] = Thinking.DEFAULT,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 128,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of fixed length.")] = False,
    repeats: Annotated[int, typer.Option(help="Passes over the prompts.")] = 1,
    block: Annotated[
        int | None,
        typer.Option(help="Prompts per turn.", show_default="1, or 4 x concurrency above 1"),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Unmeasured requests first.")] = 2,
    flush: Annotated[bool, typer.Option(help="Empty prefix caches before a turn.")] = True,
    gate: Annotated[Gate, typer.Option(help="Condition of a comparison.")] = Gate.AUTO,
    epsilon: Annotated[float, typer.Option(help="Largest regret.")] = 0.5,
    one_at_a_time: Annotated[
        bool, typer.Option(help="Restart servers for every turn; for memory that holds one.")
    ] = False,
    server_argument: Annotated[
        list[str], typer.Option(help="SGLang argument of every started server.")
    ] = [],  # noqa: B006
    logs: Annotated[
        Path | None, typer.Option(help="Folder of the servers' logs.", show_default="temporary")
    ] = None,
) -> None:
    """Measure contenders in turn on the same prompts, and compare them.

    Exit code 1: some outputs failed the gate, so that their speeds are not compared.
    """
    from ddtree.bench.measure import measure
    from ddtree.bench.prompts import load_prompts
    from ddtree.bench.results import read_run, stored_line, write_line

    plan = Plan(max_new_tokens, ignore_eos, repeats, block, warmup, gate.value, epsilon, flush)
    conditions = cells(_integers(concurrency), _floats(temperature), _THINKING[thinking.value])
    if endpoint:
        compared = endpoints(endpoint)
    else:
        names = [mode.strip() for mode in modes.split(",") if mode.strip()]
        compared = contenders(names, _integers(budgets), contender)
    for file in filter(None, (out, report)):
        if not file.absolute().parent.is_dir():
            raise BenchError(f"{file} cannot be written: there is no folder {file.parent}")
    asked = load_prompts(prompts, limit)
    pair = _pair(target, drafter, compared)
    folder = logs or Path(tempfile.mkdtemp(prefix="ddtree-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    backends = _backends(engine, compared, asked, pair, dtype, device, folder, server_argument)
    settings = {
        "prompts": Path(prompts).name,
        "count": len(asked),
        "engine": "endpoints" if endpoint else engine.value,
        "target": _name(pair[0]),
        "drafter": _name(pair[1]),
        "dtype": dtype,
        "device": device if engine is Engine.REFERENCE else None,
        "one_at_a_time": one_at_a_time,
        "server_arguments": server_argument,
    }
    write_line(out, _header(compared, conditions, plan, settings), first=True)
    with _progress() as tick:
        for results in measure(
            backends, conditions, len(asked), plan, keep=not one_at_a_time, tick=tick
        ):
            for result in results:
                write_line(out, stored_line(result))
    write_line(out, {"kind": "servers"} | {b.contender.label: b.describe() for b in backends})
    stored = read_run(out)
    _print(stored)
    if report is not None:
        _write_report(stored, report)
    if any(one.verdict.passed is False for one in stored.stored):
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="JSONL of a run.")],
    out: Annotated[Path, typer.Option(help="HTML file.")],
) -> None:
    """Make the HTML report of a stored run."""
    from ddtree.bench.results import read_run

    _write_report(read_run(results), out)


@app.command()
def tables(
    files: Annotated[list[Path], typer.Argument(help="Markdown files with markers.")],
    results: Annotated[Path, typer.Option(help="Folder of the stored results.")] = Path(
        "benchmarks/results"
    ),
    check: Annotated[bool, typer.Option(help="Change nothing; exit 1 if they differ.")] = False,
) -> None:
    """Fill the tables and numbers of Markdown files from stored results."""
    from ddtree.bench.tables import regenerate

    stale = []
    for file in files:
        old = file.read_text(encoding="utf-8")
        new = regenerate(old, results)
        if new != old:
            stale.append(file)
            if not check:
                file.write_text(new, encoding="utf-8")
    for file in stale:
        _console.print(f"{file} {'differs from' if check else 'now matches'} {results}")
    if check and stale:
        raise typer.Exit(1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in _numbers(text, int)]


def _floats(text: str) -> list[float]:
    return [float(number) for number in _numbers(text, float)]


def _numbers(text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BenchError(f"{text!r} is not a list of numbers such as 1,2,4") from None


def _pair(
    target: str | None, drafter: str | None, compared: Sequence[Contender]
) -> tuple[str | None, str | None]:
    """Target and drafter as given, or the default ones."""
    from ddtree.drafter.shipped import shipped_drafter
    from ddtree.engine.default_target import prepare_default_target

    if all(one.mode == "endpoint" for one in compared):
        return target, drafter
    if drafter is None and target is None and (shipped := shipped_drafter()) is not None:
        drafter = str(shipped)
    return target or str(prepare_default_target()), drafter


def _name(model: str | None) -> str | None:
    """A model's name without the folders of this machine."""
    return Path(model).name if model and Path(model).is_dir() else model


def _backends(
    engine: Engine,
    compared: Sequence[Contender],
    asked: Sequence[Any],
    pair: tuple[str | None, str | None],
    dtype: str,
    device: str,
    folder: Path,
    extra: Sequence[str],
) -> list[Backend]:
    target, drafter = pair
    if compared[0].mode == "endpoint":
        from ddtree.bench.servers import Endpoint

        return [Endpoint(one, asked, target) for one in compared]
    assert target is not None
    if engine is Engine.REFERENCE:
        from ddtree.bench.reference import Models, ReferenceBackend

        needs = any(one.mode != "ar" for one in compared)
        models = Models(target, drafter if needs else None, dtype, device)
        return [ReferenceBackend(one, asked, models) for one in compared]
    from ddtree.bench.servers import StartedServer

    return [
        StartedServer(
            one, asked, target=target, drafter=drafter, dtype=dtype,
            log=folder / f"{one.label.replace(':', '-')}.log", extra=extra,
        )
        for one in compared
    ]  # fmt: skip


def _header(
    compared: Sequence[Contender], conditions: Sequence[Cell], plan: Plan, settings: dict[str, Any]
) -> dict[str, Any]:
    from ddtree.bench.machine import environment

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "kind": "run",
        "started": now,
        **environment(),
        "settings": settings,
        "plan": asdict(plan),
        "contenders": [asdict(one) for one in compared],
        "cells": [asdict(cell) for cell in conditions],
    }


@contextmanager
def _progress():
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=_console) as progress:
        task = progress.add_task("starting", total=None)

        def tick(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield tick


def _print(stored: Any) -> None:
    from ddtree.bench.results import COLUMNS, summarise

    for cell, rows in summarise(stored).items():
        table = Table("contender", title=str(cell))
        for name in COLUMNS[:3] + COLUMNS[-1:]:
            table.add_column(name, justify="right")
        for row in rows:
            shown = row.cells(row is rows[0])
            table.add_row(row.stored.contender, *shown[:3], shown[-1])
        _console.print(table)


def _write_report(stored: Any, file: Path) -> None:
    from ddtree.bench.report import html_report

    file.write_text(html_report(stored), encoding="utf-8")
    _console.print(f"the report is in {file}")
