"""What a contender returns: answers, visits, and the interface a backend offers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree.bench.plan import Cell, Contender, Plan


@dataclass(frozen=True)
class Answer:
    """One request, as its client saw it.

    Attributes:
        prompt: index of the prompt.
        tokens: new tokens; None where the endpoint returns text only.
        text: the text, where there are no tokens.
        count: new tokens.
        first_count: tokens that came with the first event.
        first_seconds: from sending to the first event (TTFT).
        seconds: from sending to the last event.
        histogram: rounds by committed tokens; None where the endpoint does not say.
    """

    prompt: int
    tokens: list[int] | None
    text: str
    count: int
    first_count: int
    first_seconds: float
    seconds: float
    histogram: dict[int, int] | None = None

    @property
    def output(self) -> list[int] | str:
        return self.text if self.tokens is None else self.tokens

    @property
    def token_seconds(self) -> float | None:
        """Seconds per token after the first event (TPOT); None without any."""
        rest = self.count - self.first_count
        return (self.seconds - self.first_seconds) / rest if rest > 0 else None


@dataclass(frozen=True)
class Visit:
    """One contender's turn: some prompts answered together, in `seconds` of wall time."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.count for answer in self.answers)


@dataclass
class Ledger:
    """Seconds by stage over `rounds` rounds; stages as in `ddtree.metrics.STAGES`."""

    rounds: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, rounds: int, seconds: Mapping[str, float]) -> None:
        self.rounds += rounds
        self.seconds.update(seconds)

    def milliseconds(self) -> dict[str, float]:
        """Per round."""
        if not self.rounds:
            return {}
        return {s: t / self.rounds * 1e3 for s, t in self.seconds.items() if t}


class Backend(Protocol):
    """Something that answers prompts the way one contender does."""

    contender: Contender

    @property
    def dtype(self) -> str | None:
        """Name of the target's dtype, if known."""

    @property
    def can_score(self) -> bool:
        """Whether `regrets` works."""

    def open(self) -> None:
        """Be ready to answer; does nothing if it is."""

    def close(self) -> None:
        """Free everything."""

    def flush(self) -> None:
        """Forget every prefix."""

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        """Answer the prompts with these indices, `cell.concurrency` at a time."""

    def ledger(self) -> Ledger:
        """Stage times since the last call."""

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        """Per token, how far its logit is below the best one of one forward over the whole."""

    def describe(self) -> dict[str, Any]:
        """What answered, for the record."""


@contextmanager
def opened(backend: Backend, keep: bool) -> Iterator[None]:
    """Open for a while, and close again unless it may stay."""
    backend.open()
    try:
        yield
    finally:
        if not keep:
            backend.close()
