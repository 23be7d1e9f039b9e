"""The commands and their options; each hands over to a module that does the work.

torch and transformers are imported inside commands only, so that ``ddtree --help`` is immediate.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import ddtree
from ddtree.cli.errors import OneLineErrors
from ddtree.cli.pair import UNTRAINED, Pair, default_target, open_pair, read_prompt

DEMO_PROMPT = (
    "A farmer has 12 hens. Each hen lays 5 eggs a week, and eggs are sold by the dozen for "
    "4 dollars. How much does the farmer earn in 3 weeks? Explain step by step."
)
SHOW_PROMPT = "Why is the sky blue? Answer in one short paragraph."

app = typer.Typer(
    cls=OneLineErrors,
    help="DDTree speculative decoding with DFlash drafters.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Text goes to stdout, everything about it to stderr.
_out, _err = Console(), Console(stderr=True)


class Mode(StrEnum):
    """The engine's modes; here, so that a wrong one is refused before anything is loaded."""

    AR = "ar"
    DFLASH = "dflash"
    DDTREE = "ddtree"


TargetOption = Annotated[
    str | None, typer.Option("--target", help="Target: folder or hub id.", show_default="SmolLM2")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=f"Drafter: folder, hub id, or '{UNTRAINED}' for an untrained one.",
        show_default="the shipped one",
    ),
]
BudgetOption = Annotated[
    int | None, typer.Option("--budget", help="Drafted nodes per round.", show_default="32")
]
ChainSeedOption = Annotated[
    bool, typer.Option("--chain-seed", help="Put the drafter's best chain in every tree.")
]
LengthOption = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate.")]
PromptOption = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")]
PromptFileOption = Annotated[
    Path | None, typer.Option("--prompt-file", help="Read the prompt from a file; - for stdin.")
]
RawOption = Annotated[bool, typer.Option("--raw", help="Take the prompt without chat template.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16 or float16.", show_default="the fastest good one"
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Torch device.", show_default="cuda, else cpu")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write one machine-readable record here.")
]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"sglang-ddtree {ddtree.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_new_tokens: LengthOption = 96,
    budget: BudgetOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    servers: Annotated[
        bool, typer.Option(help="Ask SGLang servers too, where SGLang is installed.")
    ] = True,
    json_file: JsonOption = None,
) -> None:
    """Watch one prompt decoded three ways, plain, chain and tree; then by SGLang servers."""
    from ddtree.cli.demo import closing, run_demo, untrained_note, verdict
    from ddtree.cli.run import check_output, header, write_json

    check_output(json_file)
    text = read_prompt(prompt, prompt_file, DEMO_PROMPT)
    pair = open_pair(_err, target, drafter, dtype=dtype, device=device, untrained_if_none=True)
    watched = run_demo(_out, pair, text, max_new_tokens, budget)
    runs = [one.run for one in watched]
    record = header(pair, "demo")
    outputs = {run.settings.mode: run.tokens for run in runs}
    for part in (closing(runs), verdict(outputs, record["dtype"]), untrained_note(pair)):
        if part is not None:
            _out.print(part)
    modes = {one.run.settings.mode: one.run.record(one.text.plain) for one in watched}
    agree = all(tokens == runs[0].tokens for tokens in outputs.values())
    record |= {"prompt": text, "outputs_agree": agree, "modes": modes}
    if servers and pair.trained and find_spec("sglang") is not None:
        record["servers"] = _ask_servers(pair, text, max_new_tokens, budget, record["dtype"])
    write_json(json_file, record)


def _ask_servers(pair: Pair, text: str, length: int, budget: int | None, dtype: str) -> dict:
    from ddtree.cli.demo import verdict
    from ddtree.cli.demo_server import ask_servers, server_record, server_table

    answers = ask_servers(_out, pair, text, length, budget, dtype)
    _out.print(server_table(answers))
    _out.print(verdict({mode: list(a.tokens or []) for mode, a in answers.items()}, dtype))
    return {mode: server_record(answer) for mode, answer in answers.items()}


@app.command()
def generate(
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    mode: Annotated[Mode, typer.Option(help="Plain, chain or tree.")] = Mode.DDTREE,
    budget: BudgetOption = None,
    chain_seed: ChainSeedOption = False,
    max_new_tokens: LengthOption = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Mass of the tokens kept.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the best token's chance.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    raw: RawOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Generate text: the answer to stdout as it comes, the figures to stderr."""
    from ddtree.cli.run import Run, Settings, check_output, header, write_json
    from ddtree.cli.text import TextStream

    check_output(json_file)
    asked = read_prompt(prompt, prompt_file)
    settings = Settings(
        mode.value, max_new_tokens, budget, chain_seed, temperature, top_p, top_k, min_p, seed
    )
    pair = open_pair(_err, target, drafter, dtype=dtype, device=device, drafts=mode is not Mode.AR)
    run = Run(pair, pair.input_ids(asked, raw), settings)
    stream, text = TextStream(pair.tokenizer), ""
    for step in run.rounds():
        text += (new := stream.push(step.tokens))
        typer.echo(new, nl=False)
    text += (rest := stream.finish())
    typer.echo(rest)
    _err.print(f"[dim]{run.summary()}[/]", highlight=False, soft_wrap=True)
    write_json(json_file, header(pair, "generate") | {"prompt": asked} | run.record(text))


@app.command()
def show(
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    number: Annotated[int, typer.Option("--round", help="Round to draw, from 1.")] = 1,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Also draw it here.")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    budget: BudgetOption = None,
    chain_seed: ChainSeedOption = False,
    raw: RawOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Draw one round's tree: tokens, probabilities, the path the target accepted."""
    from ddtree.cli.run import Run, Settings, check_output, header, write_json, write_text
    from ddtree.cli.show import draw, take_picture
    from ddtree.cli.svg import svg

    check_output(svg_file, json_file)
    asked = read_prompt(prompt, prompt_file, SHOW_PROMPT)
    pair = open_pair(_err, target, drafter, dtype=dtype, device=device, untrained_if_none=True)
    # Room for this many full rounds and for a whole tree in the last.
    length = 1 + max(number, 1) * pair.drafter.block_size
    settings = Settings("ddtree", length, budget, chain_seed)
    picture = take_picture(Run(pair, pair.input_ids(asked, raw), settings), number, asked)
    _out.print(draw(picture))
    if svg_file is not None:
        write_text(svg_file, svg(picture))
    write_json(json_file, header(pair, "show") | picture.record())


@app.command()
def model(
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="the cache")
    ] = None,
) -> None:
    """Prepare the default target, SmolLM2-135M-Instruct, and print its folder."""
    typer.echo(default_target(_err, out))


@app.command()
def calibrate(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Measurements of each size.", show_default=True)
    ] = 7,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what verifying, drafting and the rest of a round cost on this machine."""
    from ddtree.cli.calibrate import run_calibration
    from ddtree.cli.run import check_output, header, write_json

    check_output(json_file)
    pair = open_pair(_err, target, drafter, dtype=dtype, device=device)
    record = run_calibration(_out, _err, pair, repetitions)
    write_json(json_file, header(pair, "calibrate") | record)


_ELSEWHERE: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True}
}


def _hand_over(module: str, name: str, context: typer.Context) -> None:
    """Run a command or a group that lives elsewhere with this command's arguments."""
    found = getattr(import_module(module), name)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer()
        found.command(**_ELSEWHERE)(command)
    run = typer.main.get_command(found)
    code = run.main(context.args, prog_name=context.command_path, standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


@app.command(add_help_option=False, **_ELSEWHERE)
def train(context: typer.Context) -> None:
    """Prepare data for a drafter and train it."""
    _hand_over("ddtree.train.cli", "app", context)


@app.command("eval", add_help_option=False, **_ELSEWHERE)
def evaluate(context: typer.Context) -> None:
    """Estimate a drafter's tau, chain and tree."""
    _hand_over("ddtree.train.cli", "evaluate", context)


@app.command(add_help_option=False, **_ELSEWHERE)
def serve(context: typer.Context) -> None:
    """Serve a target with SGLang and DDTree."""
    _hand_over("ddtree.sglang.serve", "serve", context)


@app.command(add_help_option=False, **_ELSEWHERE)
def bench(context: typer.Context) -> None:
    """Measure ways to decode against each other."""
    _hand_over("ddtree.bench.cli", "app", context)
