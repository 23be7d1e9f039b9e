"""Stored runs: one JSONL, whose first line says how, and one line per contender and cell.

Requests are kept as short columns and outputs as their comparison with the baseline's, so that a
run of a thousand requests takes some 50 kB. Every figure in tables and plots is computed from these
lines by `summarise`.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench.gate import Verdict
from ddtree.bench.measure import Result
from ddtree.bench.plan import BenchError, Cell

_RESAMPLES = 2000
_PERCENTILES = (50, 90, 99)
# A bootstrap over fewer turns says nothing.
_FEWEST_TURNS = 5
COLUMNS = (
    "tokens/s",
    "speed-up (95 %)",
    "tau",
    "TTFT p50 / p90 / p99, ms",
    "TPOT p50 / p90 / p99, ms",
    "outputs against the baseline's",
)


@dataclass(frozen=True)
class Stored:
    """One contender in one cell, as read back.

    Attributes:
        visits: (prompts, tokens, seconds) of each turn.
        first_ms, token_ms: TTFT and TPOT of each request; `token_ms` may be None.
        ledger: milliseconds per round by stage; empty where unknown.
    """

    contender: str
    cell: Cell
    visits: list[tuple[int, int, float]]
    first_ms: list[float]
    token_ms: list[float | None]
    histogram: dict[int, int] | None
    ledger: dict[str, float]
    verdict: Verdict

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each visit."""
        return [tokens / seconds for _, tokens, seconds in self.visits]

    @property
    def tau(self) -> float | None:
        """Committed tokens per round; None where unknown."""
        if not self.histogram:
            return None
        return sum(n * c for n, c in self.histogram.items()) / sum(self.histogram.values())


@dataclass(frozen=True)
class Run:
    """A stored run: the first line and the rest, the baseline first in every cell."""

    header: dict[str, Any]
    stored: list[Stored]

    @property
    def baseline(self) -> str:
        return str(self.header["contenders"][0]["label"])

    def cells(self) -> dict[Cell, list[Stored]]:
        """By cell, in the order measured."""
        found: dict[Cell, list[Stored]] = defaultdict(list)
        for one in self.stored:
            found[one.cell].append(one)
        return dict(found)


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        rate: median tokens per second over visits.
        speedup: median over turns of the contender's rate to the baseline's in the same turn, with
            a 95 % bootstrap interval over turns; None for outputs that failed the gate.
        first_ms, token_ms: 50th, 90th and 99th percentile.
        refused: the gate failed, so nothing is compared.
    """

    stored: Stored
    rate: float
    speedup: tuple[float, float, float] | None
    first_ms: tuple[float, ...]
    token_ms: tuple[float, ...]

    @property
    def refused(self) -> bool:
        return self.stored.verdict.passed is False

    def cells(self, baseline: bool) -> list[str]:
        """Text of the columns `COLUMNS`."""
        tau, verdict = self.stored.tau, self.stored.verdict
        inherited = "greedy: " if verdict.passed is not None and not self.stored.cell.greedy else ""
        return [
            f"{self.rate:.1f}",
            "1" if baseline else self.speedup_text(),
            "\u2013" if tau is None else f"{tau:.2f}",
            *(
                " / ".join(f"{p:.0f}" for p in some) or "\u2013"
                for some in (self.first_ms, self.token_ms)
            ),
            "baseline" if baseline else f"{inherited}{verdict}",
        ]

    def speedup_text(self) -> str:
        """Ratio and interval; a few turns give no interval."""
        if self.speedup is None:
            return "not compared"
        ratio, low, high = self.speedup
        turns = len(self.stored.visits)
        if turns < _FEWEST_TURNS:
            return f"{ratio:.2f} ({turns} turn{'s' * (turns > 1)})"
        return f"{ratio:.2f} ({low:.2f}\u2013{high:.2f})"


def stored_line(result: Result) -> dict[str, Any]:
    """A measured result as one line of the file."""
    answers = result.answers
    return {
        "kind": "cell",
        "contender": result.contender,
        "cell": asdict(result.cell),
        "visits": [[len(v.answers), v.tokens, round(v.seconds, 6)] for v in result.visits],
        "first_ms": [round(a.first_seconds * 1e3, 1) for a in answers],
        "token_ms": [
            None if (t := a.token_seconds) is None else round(t * 1e3, 2) for a in answers
        ],
        "tokens": [a.count for a in answers],
        "histogram": result.histogram,
        "ledger": {s: round(ms, 3) for s, ms in result.ledger.milliseconds().items()},
        "ledger_rounds": result.ledger.rounds,
        "verdict": result.verdict.record(),
    }


def write_line(path: Path, record: dict[str, Any], *, first: bool = False) -> None:
    """Append a line; `first` starts the file anew."""
    with path.open("w" if first else "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_run(path: Path) -> Run:
    """Read a stored run.

    Raises:
        BenchError: the file is not one, or holds no measured cell.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BenchError(f"the results {path} cannot be read: {error}") from None
    if not lines or lines[0].get("kind") != "run":
        raise BenchError(f"{path} was not written by 'ddtree bench run'")
    stored = [_read_line(line) for line in lines[1:] if line["kind"] == "cell"]
    if not stored:
        raise BenchError(f"{path} holds no measured cell; the run was stopped before its first one")
    return Run(lines[0], stored)


def _read_line(line: dict[str, Any]) -> Stored:
    histogram = line["histogram"]
    return Stored(
        contender=line["contender"],
        cell=Cell(**line["cell"]),
        visits=[(int(n), int(tokens), float(s)) for n, tokens, s in line["visits"]],
        first_ms=line["first_ms"],
        token_ms=line["token_ms"],
        histogram={int(n): c for n, c in histogram.items()} if histogram else None,
        ledger=line["ledger"],
        verdict=Verdict.read(line["verdict"]),
    )


def summarise(run: Run) -> dict[Cell, list[Row]]:
    """A row for every contender and cell."""
    return {cell: [_row(one, group[0]) for one in group] for cell, group in run.cells().items()}


def _row(one: Stored, baseline: Stored) -> Row:
    speedup = None
    if one.verdict.passed is not False:
        speedup = paired_ratio(one.rates, baseline.rates)
    return Row(
        one, statistics.median(one.rates), speedup, percentiles(one.first_ms),
        percentiles(one.token_ms),
    )  # fmt: skip


def percentiles(values: Iterable[float | None]) -> tuple[float, ...]:
    """50th, 90th and 99th percentile of what is known; empty without any."""
    known = [value for value in values if value is not None]
    return tuple(float(p) for p in np.percentile(known, _PERCENTILES)) if known else ()


def paired_ratio(
    rates: Sequence[float], baseline: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Median ratio over pairs and its 95 % percentile bootstrap interval over pairs."""
    ratios = np.asarray(rates, dtype=np.float64) / np.asarray(baseline, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)
