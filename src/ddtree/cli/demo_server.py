"""The demo's prompt through real SGLang servers, one after another: plain, DFLASH, DDTREE."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ddtree.cli.demo import WAYS
from ddtree.cli.pair import Pair, working

if TYPE_CHECKING:
    from ddtree.bench.answers import Answer

_NAMES = {"ar": "plain", "dflash": "DFLASH", "ddtree": "DDTREE"}


def ask_servers(
    console: Console, pair: Pair, prompt: str, max_new_tokens: int, budget: int | None, dtype: str
) -> dict[str, Answer]:
    """Start a server of each kind, ask it the prompt, and stop it; answers by mode."""
    from ddtree.bench.plan import Cell, Contender, Plan
    from ddtree.bench.servers import StartedServer
    from ddtree.engine.generate import DEFAULT_BUDGET
    from ddtree.train.prompts import Prompt

    answers = {}
    with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as folder:
        for mode in WAYS:
            nodes = (budget or DEFAULT_BUDGET) if mode == "ddtree" else None
            server = StartedServer(
                Contender(_NAMES[mode], mode, nodes),
                [Prompt.of_user(prompt, "demo")],
                target=pair.target_name,
                drafter=pair.drafter_name,
                dtype=dtype,
                log=Path(folder) / f"{mode}.log",
            )
            try:
                with working(console, f"starting the {_NAMES[mode]} server"):
                    server.open()
                    server.ask([0], Cell(), Plan(max_new_tokens=min(8, max_new_tokens)))
                    server.flush()
                with working(console, f"asking the {_NAMES[mode]} server"):
                    visit = server.ask([0], Cell(), Plan(max_new_tokens=max_new_tokens))
            finally:
                server.close()
            answers[mode] = visit.answers[0]
    return answers


def server_table(answers: dict[str, Answer]) -> Table:
    """Rates and tau of the servers, side by side."""
    table = Table(title="the same prompt, greedy, from an unmodified SGLang server on this machine")
    table.add_column("server", style="bold")
    for name in ("tokens", "tokens/s", "tau", "rounds", "first token, s"):
        table.add_column(name, justify="right")
    for mode, answer in answers.items():
        one = server_record(answer)
        table.add_row(
            _NAMES[mode],
            str(one["tokens"]),
            f"{one['tokens_per_second']:.1f}",
            f"{one['tau']:.2f}",
            str(one["rounds"]),
            f"{answer.first_seconds:.2f}",
        )
    return table


def server_record(answer: Answer) -> dict[str, Any]:
    """One server's figures; without a histogram every token took a round."""
    rounds = sum((answer.histogram or {1: answer.count}).values())
    return {
        "tokens": answer.count,
        "tokens_per_second": round(answer.count / answer.seconds, 2),
        "tau": round(answer.count / max(rounds, 1), 3),
        "rounds": rounds,
        "token_ids": answer.tokens,
    }
