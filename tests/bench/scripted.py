"""A backend whose answers and times are written down, to see what the protocol makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddtree.bench.answers import Answer, Ledger, Visit
from ddtree.bench.plan import Cell, Contender, Plan

Script = Callable[[int, Cell], list[int]]


def counting(prompt: int, cell: Cell) -> list[int]:
    """Eight tokens that depend on the prompt alone."""
    return [prompt * 100 + n for n in range(8)]


class Scripted:
    """Answers from a function, at a fixed rate in tokens per second.

    Attributes:
        calls: everything asked of it, in order, shared with the other contenders of a test.
    """

    can_score = True

    def __init__(
        self,
        label: str,
        calls: list[tuple[str, Any]],
        *,
        script: Script = counting,
        rate: float = 100.0,
        dtype: str = "float32",
        regret: float = 0.0,
        budget: int | None = None,
        committed: int = 1,
    ) -> None:
        self.contender = Contender(label, "ddtree" if budget else "ar", budget)
        self.calls, self.dtype = calls, dtype
        self._script, self._rate, self._regret = script, rate, regret
        self._committed, self._ledger = committed, Ledger()

    def open(self) -> None:
        self.calls.append((self.contender.label, "open"))

    def close(self) -> None:
        self.calls.append((self.contender.label, "close"))

    def flush(self) -> None:
        self.calls.append((self.contender.label, "flush"))

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        self.calls.append((self.contender.label, list(prompts)))
        answers = [self._answer(prompt, cell) for prompt in prompts]
        rounds = sum(sum((a.histogram or {}).values()) for a in answers)
        self._ledger.add(rounds, {"draft": rounds * 0.002, "verify": rounds * 0.010})
        return Visit(answers, sum(a.count for a in answers) / self._rate)

    def _answer(self, prompt: int, cell: Cell) -> Answer:
        tokens = self._script(prompt, cell)
        seconds = len(tokens) / self._rate
        rounds = max(1, (len(tokens) - 1) // self._committed)
        return Answer(
            prompt, tokens, "", len(tokens), 1, seconds / len(tokens), seconds,
            {self._committed: rounds},
        )  # fmt: skip

    def ledger(self) -> Ledger:
        ledger, self._ledger = self._ledger, Ledger()
        return ledger

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        own = counting(prompt, cell)
        return [0.0 if a == b else self._regret for a, b in zip(tokens, own, strict=False)]

    def describe(self) -> dict[str, Any]:
        return {"engine": "scripted"}
