"""The same prompt decoded three ways, live, and what each way cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ddtree.cli.pair import UNTRAINED_NOTE, Pair, working
from ddtree.cli.run import Run, Settings
from ddtree.cli.text import TextStream

if TYPE_CHECKING:
    from ddtree.engine import Round

WAYS = {
    "ar": "plain decoding, one token a forward",
    "dflash": "the drafter's best chain, verified in one forward",
    "ddtree": "the drafter's best tree, verified in one forward",
}
_FRAMES_PER_SECOND = 12


class LiveRun:
    """A run that is watched: drafted tokens green, the target's own in plain ink."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.text = Text()
        self._stream = TextStream(run.pair.tokenizer)

    def show(self, console: Console) -> None:
        """Decode to the end; drawing is not counted in the run's seconds."""
        drawn = 0.0
        with Live(self._panel(), console=console, auto_refresh=False) as live:
            for step in self.run.rounds():
                self._append(step)
                if time.monotonic() - drawn > 1 / _FRAMES_PER_SECOND:
                    live.update(self._panel(), refresh=True)
                    drawn = time.monotonic()
            self.text.append(self._stream.finish())
            live.update(self._panel(), refresh=True)

    def _append(self, step: Round) -> None:
        drafted = max(len(step.path) - 1, 0)
        for index, token in enumerate(step.tokens):
            self.text.append(self._stream.push([token]), "green" if index < drafted else "")

    def _panel(self) -> Panel:
        mode = self.run.settings.mode
        status = f"{self.run.tokens_per_second:.1f} tokens/s · tau {self.run.tau:.2f}"
        return Panel(
            self.text,
            title=f"[bold]{mode}[/]  [dim]{WAYS[mode]}[/]",
            title_align="left",
            subtitle=status,
            subtitle_align="right",
            padding=(0, 1),
        )


def run_demo(
    console: Console, pair: Pair, prompt: str, max_new_tokens: int, budget: int | None
) -> list[LiveRun]:
    """Decode the prompt in every mode, showing text, rate and tau as they come."""
    ids = pair.input_ids(prompt, raw=False)
    settings = {
        mode: Settings(mode, max_new_tokens, budget if mode == "ddtree" else None) for mode in WAYS
    }
    console.print(Text.assemble(("prompt  ", "dim"), prompt, "\n"))
    with working(console, "warming up"):
        for mode in WAYS:
            for _ in Run(pair, ids, Settings(mode, min(8, max_new_tokens), budget)).rounds():
                pass
    done = []
    for one in settings.values():
        done.append(LiveRun(Run(pair, ids, one)))
        done[-1].show(console)
    return done


def closing(runs: list[Run]) -> Table:
    """Rates, tau, rounds and the seconds of every stage, side by side."""
    from ddtree.metrics import STAGES

    table = Table(title="seconds by stage; a round is draft, build, verify, accept, commit")
    table.add_column("mode", style="bold")
    for name in ("tokens", "tokens/s", "tau", "rounds", *STAGES):
        table.add_column(name, justify="right", style="dim" if name in STAGES else "")
    for run in runs:
        stages = run.stage_seconds()
        table.add_row(
            run.settings.mode,
            str(len(run.tokens)),
            f"{run.tokens_per_second:.1f}",
            f"{run.tau:.2f}",
            str(len(run.accept_lengths)),
            *(f"{stages[name]:.2f}" for name in STAGES),
        )
    return table


def verdict(outputs: dict[str, list[int]], dtype: str) -> Text:
    """Whether the outputs agree with ``ar``'s, and if not, where they part and what that means."""
    reference = outputs["ar"]
    parted = {
        mode: _first_difference(reference, tokens)
        for mode, tokens in outputs.items()
        if tokens != reference
    }
    if not parted:
        return Text("All three outputs agree token for token.", style="green")
    where = ", ".join(f"{mode} at token {index + 1}" for mode, index in parted.items())
    why = (
        "in float32 that is a fault worth reporting"
        if dtype == "float32"
        else f"in {dtype} a forward over several tokens rounds differently, so near-ties may flip"
    )
    return Text(f"The outputs differ from ar: {where}; {why}.", style="yellow")


def untrained_note(pair: Pair) -> Text | None:
    """What to think of the figures when the drafter is untrained."""
    if pair.trained:
        return None
    return Text(f"Note: {UNTRAINED_NOTE}, and drafting only costs time here.", style="yellow")


def _first_difference(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
