"""The protocol: every contender answers the same prompts in turn, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ddtree.bench.answers import Answer, Backend, Ledger, Visit, opened
from ddtree.bench.gate import Verdict, choose_gate, judge
from ddtree.bench.plan import Cell, Plan


@dataclass
class Result:
    """Everything one contender did in one cell.

    Attributes:
        visits: in the order they happened; the n-th of every contender in a cell answered the same
            prompts, directly before or after the others'.
        ledger: mean stage times, where the contender tells them.
        verdict: how its outputs relate to the baseline's.
    """

    contender: str
    cell: Cell
    visits: list[Visit] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    verdict: Verdict = field(default_factory=lambda: Verdict("none", None))

    @property
    def answers(self) -> list[Answer]:
        return [answer for visit in self.visits for answer in visit.answers]

    @property
    def histogram(self) -> dict[int, int] | None:
        """Rounds by committed tokens; None where unknown."""
        known = [answer.histogram for answer in self.answers if answer.histogram is not None]
        total = sum((Counter(one) for one in known), Counter[int]())
        return dict(sorted(total.items())) or None


def measure(
    backends: Sequence[Backend],
    cells: Sequence[Cell],
    prompts: int,
    plan: Plan,
    *,
    keep: bool = True,
    tick: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Iterator[list[Result]]:
    """Measure cell by cell; the first backend is the baseline.

    Args:
        backends: the contenders.
        cells: conditions, greedy ones first.
        prompts: how many there are; backends know them by index.
        plan: what each contender does.
        keep: False to open a backend for every visit and close it again.
        tick: told the visits done, their total and what comes next.
    Yields:
        One `Result` per backend for each cell, baseline first, verdicts included.
    """
    gate = choose_gate(plan, backends[0]) if plan.gate != "auto" else None
    visits = {c: len(list(plan.blocks(prompts, c.concurrency))) * plan.repeats for c in cells}
    total = sum(visits.values()) * len(backends)
    done = 0
    verdicts: dict[tuple[str, Cell], Verdict] = {}
    with ExitStack() as stack:
        for backend in backends:
            stack.callback(backend.close)
            if keep:  # now, so that no start disturbs a measured visit
                tick(done, total, f"starting {backend.contender.label}")
                backend.open()
        for cell in cells:
            results = [Result(backend.contender.label, cell) for backend in backends]
            warm: set[int] = set()
            for turn, block in enumerate(_turns(plan, prompts, cell)):
                # Rotated, so that no contender always follows the same one.
                for place in range(len(backends)):
                    which = (turn + place) % len(backends)
                    backend, result = backends[which], results[which]
                    tick(done, total, f"{cell}: {result.contender}")
                    with opened(backend, keep):
                        if which not in warm or not keep:
                            _warm_up(backend, prompts, cell, plan)
                            warm.add(which)
                        result.visits.append(_visit(backend, block, cell, plan, result.ledger))
                    done += 1
            tick(done, total, f"{cell}: comparing outputs")
            with opened(backends[0], keep):
                gate = gate or choose_gate(plan, backends[0])
                _compare(gate, plan, backends[0], results, verdicts)
            yield results
    tick(done, total, "done")


def _turns(plan: Plan, prompts: int, cell: Cell) -> Iterator[range]:
    for _ in range(plan.repeats):
        yield from plan.blocks(prompts, cell.concurrency)


def _warm_up(backend: Backend, prompts: int, cell: Cell, plan: Plan) -> None:
    count = max(plan.warmup, cell.concurrency)
    backend.ask([index % prompts for index in range(count)], cell, plan)


def _visit(backend: Backend, block: range, cell: Cell, plan: Plan, ledger: Ledger) -> Visit:
    if plan.flush:
        backend.flush()
    backend.ledger()  # what came before is not this visit's
    visit = backend.ask(block, cell, plan)
    stages = backend.ledger()
    ledger.add(stages.rounds, stages.seconds)
    return visit


def _compare(
    gate: str,
    plan: Plan,
    baseline: Backend,
    results: list[Result],
    verdicts: dict[tuple[str, Cell], Verdict],
) -> None:
    cell = results[0].cell
    for result in results[1:]:
        if cell.greedy:
            result.verdict = judge(
                gate, plan.epsilon, cell, baseline, results[0].answers, result.answers
            )
            verdicts[result.contender, cell] = result.verdict
        else:
            greedy = Cell(cell.concurrency, 0.0, cell.thinking)
            inherited = verdicts.get((result.contender, greedy))
            result.verdict = inherited or Verdict("none", None)
