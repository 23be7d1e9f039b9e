"""What is measured: contenders, cells, and the plan that every contender follows alike."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

MODES = ("ar", "dflash", "ddtree")
GATES = ("auto", "equal", "regret", "none")


class BenchError(ValueError):
    """A benchmark cannot be run, read or compared; the message says what to change."""


@dataclass(frozen=True)
class Contender:
    """One way to decode.

    Attributes:
        label: its name in tables.
        mode: ``ar``, ``dflash``, ``ddtree``, or ``endpoint`` for a running server.
        budget: drafted nodes per round of mode ``ddtree``.
        arguments: further SGLang arguments of its server.
        environment: variables of its server.
        url: the running server of mode ``endpoint``.
    """

    label: str
    mode: str
    budget: int | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    url: str | None = None


@dataclass(frozen=True)
class Cell:
    """One condition: requests in flight, temperature, thinking (None: the template's default)."""

    concurrency: int = 1
    temperature: float = 0.0
    thinking: bool | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __str__(self) -> str:
        parts = [f"concurrency {self.concurrency}"]
        parts.append("greedy" if self.greedy else f"temperature {self.temperature:g}")
        if self.thinking is not None:
            parts.append(f"thinking {'on' if self.thinking else 'off'}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """What every contender answers, and how often.

    Attributes:
        max_new_tokens: length of an answer.
        ignore_eos: every answer has exactly `max_new_tokens` tokens.
        repeats: passes over the prompts.
        block: prompts of one visit, after which the next contender has its turn; None for one at
            concurrency 1 and four times the concurrency above.
        warmup: unmeasured requests of a contender before its first visit of a cell; at least
            as many as the cell's concurrency.
        gate: what greedy outputs must satisfy before speeds are compared; see `ddtree.bench.gate`.
        epsilon: the gate's largest regret.
        flush: empty the server's prefix cache before every visit.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False
    repeats: int = 1
    block: int | None = None
    warmup: int = 2
    gate: str = "auto"
    epsilon: float = 0.5
    flush: bool = True

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.gate not in GATES:
            raise BenchError(f"gate is {self.gate!r}; it must be one of {', '.join(GATES)}")

    def blocks(self, prompts: int, concurrency: int) -> Iterator[range]:
        """Indices of the prompts of each visit."""
        size = self.block or (1 if concurrency == 1 else 4 * concurrency)
        for start in range(0, prompts, size):
            yield range(start, min(start + size, prompts))


def contenders(
    modes: Sequence[str], budgets: Sequence[int], extra: Sequence[str] = ()
) -> list[Contender]:
    """The modes in order, ``ddtree`` once per budget, then the `extra` ones (`parse_contender`)."""
    found: list[Contender] = []
    for mode in modes:
        if mode not in MODES:
            raise BenchError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        if mode == "ddtree":
            found += [Contender(f"ddtree:{budget}", mode, budget) for budget in budgets]
        else:
            found.append(Contender(mode, mode))
    return distinct(found + [parse_contender(text) for text in extra])


def parse_contender(text: str) -> Contender:
    """A contender from ``LABEL=MODE[:BUDGET] [NAME=VALUE ...] [--flag ...]``.

    Example: ``seeded=ddtree:32 DDTREE_CHAIN_SEED=1 --page-size 16``.
    """
    label, _, rest = text.partition("=")
    words = shlex.split(rest)
    if not label.strip() or not words:
        raise BenchError(f"the contender {text!r} is not LABEL=MODE[:BUDGET] [NAME=VALUE] [--flag]")
    mode, _, budget = words[0].partition(":")
    if mode not in MODES or (budget and not budget.isdecimal()):
        raise BenchError(f"{words[0]!r} is none of ar, dflash, ddtree or ddtree:BUDGET")
    first_flag = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
    pairs = [word.partition("=")[::2] for word in words[1:first_flag]]
    nodes = int(budget) if budget else (32 if mode == "ddtree" else None)
    return Contender(label.strip(), mode, nodes, tuple(words[first_flag:]), tuple(pairs))


def endpoints(texts: Sequence[str]) -> list[Contender]:
    """Running servers from ``LABEL=URL``."""
    found = []
    for text in texts:
        label, _, url = text.partition("=")
        if not label or not url.startswith(("http://", "https://")):
            raise BenchError(f"the endpoint {text!r} is not LABEL=http://HOST:PORT")
        found.append(Contender(label, "endpoint", url=url.rstrip("/")))
    return distinct(found)


def distinct(found: list[Contender]) -> list[Contender]:
    """The contenders, if no two share a label."""
    labels = [one.label for one in found]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise BenchError(f"two contenders are called {min(twice)}; give each its own label")
    return found


def cells(
    concurrencies: Sequence[int], temperatures: Sequence[float], thinking: Sequence[bool | None]
) -> list[Cell]:
    """Every combination, greedy cells first, since sampled ones inherit their verdicts."""
    if min(concurrencies, default=0) < 1:
        raise BenchError("concurrency must be at least 1")
    if min(temperatures, default=-1) < 0:
        raise BenchError("temperature must be 0 or more")
    return [Cell(c, t, k) for t, k, c in product(sorted(temperatures), thinking, concurrencies)]
