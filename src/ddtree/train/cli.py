"""`ddtree train ...` and `ddtree eval`."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ddtree.drafter import DrafterError, load_drafter
from ddtree.drafter.config import default_target_layer_ids
from ddtree.train.batch import BatchError
from ddtree.train.estimate import CHAIN, DocumentTau, estimate_tau
from ddtree.train.evaluate import TauInterval, tau_intervals
from ddtree.train.generate import GenerationError
from ddtree.train.prepare import eos_ids, prepare_prompts, prepare_responses, threads_available
from ddtree.train.prompts import Prompt, PromptError, read_prompts, write_instructions
from ddtree.train.settings import SettingsError, TrainSettings
from ddtree.train.sources import SourceError, read_responses
from ddtree.train.store import FeatureStore, StoreError
from ddtree.train.trainer import Trainer, TrainingStopped

app = typer.Typer(help="Train a DFlash drafter for a target.", no_args_is_help=True)
_ERRORS = (
    BatchError,
    DrafterError,
    GenerationError,
    PromptError,
    SettingsError,
    SourceError,
    StoreError,
    TrainingStopped,
)
_console = Console()
# Layers stored when none are named: z-lab's spread for a drafter of this depth.
_DEFAULT_LAYERS = 5


@app.command()
def prepare(
    target: Annotated[str, typer.Option(help="Target: folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the feature store.")],
    prompts: Annotated[list[Path], typer.Option(help="JSONL of prompts; repeatable.")] = [],  # noqa: B006
    responses: Annotated[list[Path], typer.Option(help="JSONL of known responses.")] = [],  # noqa: B006
    write: Annotated[int, typer.Option(help="Instructions the target writes itself.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Prompts to take of each file.")] = None,
    layers: Annotated[
        str, typer.Option(help="Target layers to store; z-lab's spread of five if empty.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Length of a response.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts generated together.")] = 96,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Processor threads; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the written instructions.")] = 0,
) -> None:
    """Generate responses with the target and store them with its hidden states."""
    torch.set_num_threads(threads or threads_available())
    with _clear_errors():
        model, tokenizer = load_target(target, dtype)
        layer_ids = _layer_ids(layers, model)
        asked = [p for path in prompts for p in read_prompts(path, limit)]
        if write:
            _console.print(f"the target writes {write} instructions")
            asked += write_instructions(
                model, tokenizer, write, eos_token_ids=eos_ids(model), seed=seed
            )
        known = [r for path in responses for r in read_responses(path)[:limit]]
        if not asked and not known:
            raise PromptError("nothing to prepare: give --prompts, --responses or --write")
        done = 0
        if known:
            with _bar("features", "tokens/s") as report:
                done += prepare_responses(
                    model,
                    known,
                    out,
                    layer_ids=layer_ids,
                    max_response_tokens=max_new_tokens,
                    progress=report,
                )
        if asked:
            done += _generate(model, tokenizer, asked, out, layer_ids, max_new_tokens, batch_size)
    _console.print(f"{done} documents in {out}")


def _generate(model, tokenizer, asked: list[Prompt], out, layer_ids, length, batch_size) -> int:
    with _bar("responses", "tokens/s") as report:
        return prepare_prompts(
            model,
            tokenizer,
            asked,
            out,
            layer_ids=layer_ids,
            max_new_tokens=length,
            eos_token_ids=eos_ids(model),
            batch_size=batch_size,
            progress=report,
        )


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file of the run.")],
    out: Annotated[
        str | None, typer.Option(help="Folder to write to, instead of the file's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of the file's.")] = None,
    stop_step: Annotated[int | None, typer.Option(help="Stop early at this step.")] = None,
) -> None:
    """Train, or go on where the output folder left off."""
    given = {"out": out, "steps": steps, "stop_step": stop_step}
    with _clear_errors():
        settings = TrainSettings.read(config, **{k: v for k, v in given.items() if v is not None})
        model, _ = load_target(settings.target, "float32")
        with _bar("training", "s/step") as report:
            Trainer(settings, model, say=_say, tick=report).run()
    _console.print(f"the drafter is in {Path(settings.out) / 'last'}")


def evaluate(
    drafter: Annotated[str, typer.Option(help="Drafter: folder or hub id.")],
    target: Annotated[str, typer.Option(help="Target: folder or hub id.")],
    prompts: Annotated[list[Path], typer.Option(help="JSONL of prompts; repeatable.")] = [],  # noqa: B006
    store: Annotated[list[Path], typer.Option(help="Prepared feature store; repeatable.")] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Prompts to take of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of a response.")] = 128,
    budgets: Annotated[str, typer.Option(help="Tree budgets.")] = "16,32,64",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Processor threads; 0 for all.")] = 0,
    work: Annotated[Path | None, typer.Option(help="Keep the prepared responses here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write a record here.")] = None,
) -> None:
    """Estimate tau, chain and tree, per category with bootstrap intervals.

    The target answers greedily once; each drafter is then scored against those answers without
    running the target again, so a kept --work folder makes the next evaluation cheap (--store).
    """
    torch.set_num_threads(threads or threads_available())
    with _clear_errors():
        began = time.perf_counter()
        model, tokenizer = load_target(target, dtype)
        bound = load_drafter(drafter, target=model)
        stores = list(store)
        if prompts:
            folder = work or Path(_temporary())
            asked = [p for path in prompts for p in read_prompts(path, limit)]
            ids = bound.target_layer_ids
            _generate(model, tokenizer, asked, folder, ids, max_new_tokens, 64)
            stores.append(folder)
        if not stores:
            raise PromptError("nothing to evaluate on: give --prompts or --store")
        sizes = [int(b) for b in budgets.split(",") if b]
        results = _score(bound, model, FeatureStore(stores, bound.target_layer_ids), sizes)
        intervals = tau_intervals(results)
    _console.print(_tau_table(intervals))
    if json_file is not None:
        record = {
            "drafter": drafter,
            "target": target,
            "dtype": dtype,
            "max_new_tokens": max_new_tokens,
            "seconds": round(time.perf_counter() - began, 1),
            "tau": [i.to_dict() for i in intervals],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _score(bound, model, documents: FeatureStore, budgets: list[int]) -> list[DocumentTau]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings().weight
    results: list[DocumentTau] = []
    with _bar("scoring", "documents/s") as report:
        began = time.perf_counter()
        for index in range(len(documents)):
            results += estimate_tau(bound.model, embedding, head, [documents[index]], budgets)
            report(index + 1, len(documents), (index + 1) / (time.perf_counter() - began))
    return results


def _tau_table(intervals: list[TauInterval]) -> Table:
    methods = list(dict.fromkeys(i.method for i in intervals))
    table = Table("category", "documents", title="committed tokens per round (95 % interval)")
    for method in methods:
        table.add_column(method if method == CHAIN else f"tree {method}", justify="right")
    for category in dict.fromkeys(i.category for i in intervals):
        cells = {i.method: i for i in intervals if i.category == category}
        shown = [f"{c.tau:.2f} ({c.low:.2f}-{c.high:.2f})" for c in (cells[m] for m in methods)]
        table.add_row(category, str(cells[methods[0]].documents), *shown)
    return table


def load_target(name: str, dtype: str) -> tuple[Any, Any]:
    """The target and its tokenizer.

    Raises:
        SourceError: no such model, or an unknown dtype.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in ("float32", "bfloat16"):
        raise SourceError(f"dtype is {dtype}; it must be float32 or bfloat16")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
        return model.eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the target {name} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None


def _layer_ids(text: str, model) -> list[int]:
    layers = model.config.get_text_config().num_hidden_layers
    if not text:
        return default_target_layer_ids(layers, _DEFAULT_LAYERS)
    ids = [int(i) for i in text.split(",")]
    # The last layer's output is only ever seen after the final norm.
    if any(not 0 <= i < layers - 1 for i in ids):
        raise SettingsError(f"--layers {text} must lie between 0 and {layers - 2}")
    return ids


def _say(line: str) -> None:
    _console.print(line, soft_wrap=True, highlight=False)


@contextmanager
def _clear_errors():
    try:
        yield
    except _ERRORS as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/red] {message}", highlight=False)
    raise typer.Exit(1)


@contextmanager
def _bar(what: str, unit: str):
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    rate = TextColumn("{task.fields[rate]:.1f} " + unit)
    with Progress(*columns, rate, TimeRemainingColumn(), console=_console) as progress:
        task = progress.add_task(what, total=None, rate=0.0)

        def report(done: int, total: int, rate: float) -> None:
            progress.update(task, completed=done, total=total, rate=rate)

        yield report


def _temporary() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="ddtree-eval-")
