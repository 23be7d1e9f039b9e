"""What outputs must satisfy before speeds are compared.

Speculative decoding is lossless, so a contender whose greedy outputs are not the baseline's is
either broken or rounding differently, and a fast broken server must not win a table. The gates:

* ``equal``: every greedy output is the baseline's, token for token. The default in float32.
* ``regret``: outputs may part, but at every token of an output that does, the token's logit is at
  most `epsilon` below the best one of the baseline's own forward over the same prefix. The default
  in bfloat16 and float16, where a forward over n tokens rounds differently from one over a single
  token and near-ties flip. The baseline's own outputs are scored too, as a control.
* ``none``: nothing is checked, and tables say so.

Sampled outputs cannot be compared one by one. They inherit the verdict of the greedy cell with the
same concurrency and thinking; without such a cell they count as unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddtree.bench.answers import Answer, Backend
from ddtree.bench.plan import BenchError, Cell, Plan


@dataclass(frozen=True)
class Verdict:
    """How one contender's outputs in one cell relate to the baseline's.

    Attributes:
        gate: the gate that was applied.
        passed: None where nothing was checked.
        outputs, equal: outputs compared, and how many equal the baseline's.
        first_differences: position (from 0) of the first differing token or character.
        max_regret: over the outputs that differ; None where none was scored.
        baseline_regret: over the baseline's own outputs for the same prompts.
    """

    gate: str
    passed: bool | None
    outputs: int = 0
    equal: int = 0
    first_differences: tuple[int, ...] = ()
    max_regret: float | None = None
    baseline_regret: float | None = None

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"first_differences": list(self.first_differences)}

    @classmethod
    def read(cls, record: dict[str, Any]) -> Verdict:
        """The inverse of `record`."""
        differences = tuple(record["first_differences"])
        return cls(**record | {"first_differences": differences})

    def __str__(self) -> str:
        if self.passed is None:
            return "not checked"
        parts = [f"{self.equal} of {self.outputs} equal"]
        if self.max_regret is not None:
            parts.append(f"regret {self.max_regret:.2f}")
        return ("" if self.passed else "REFUSED: ") + ", ".join(parts)


def choose_gate(plan: Plan, baseline: Backend) -> str:
    """The gate for this baseline, where the plan leaves the choice.

    Raises:
        BenchError: the baseline cannot do what the gate needs.
    """
    gate = plan.gate
    if gate == "auto":
        gate = "equal" if baseline.dtype == "float32" else "regret"
    if gate == "regret" and not baseline.can_score:
        raise BenchError(
            f"the baseline {baseline.contender.label} cannot score outputs, so --gate regret does "
            f"not work; choose --gate equal or --gate none"
        )
    return gate


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """Index of the first difference; the shorter length where one is a prefix of the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def judge(
    gate: str,
    epsilon: float,
    cell: Cell,
    baseline: Backend,
    reference: Sequence[Answer],
    answers: Sequence[Answer],
) -> Verdict:
    """Compare greedy answers with the baseline's.

    Args:
        gate: ``equal``, ``regret`` or ``none``.
        epsilon: the largest regret.
        cell: where both were measured.
        baseline: scores outputs for ``regret``.
        reference: the baseline's answers, at least one for every prompt.
        answers: the contender's.
    """
    if gate == "none":
        return Verdict(gate, None)
    expected: dict[int, list[int] | str] = {}
    for one in reference:
        expected.setdefault(one.prompt, one.output)
    parted = {}
    for number, answer in enumerate(answers):
        at = first_difference(expected[answer.prompt], answer.output)
        if at is not None:
            parted[number] = at
    equal = len(answers) - len(parted)
    verdict = Verdict(gate, not parted, len(answers), equal, tuple(parted.values()))
    if gate == "equal" or not parted:
        return verdict
    differing = [answers[number] for number in parted]
    theirs = {one.prompt for one in differing}
    control = _max_regret(baseline, cell, [a for a in reference if a.prompt in theirs])
    worst = _max_regret(baseline, cell, differing)
    return Verdict(
        gate, worst <= epsilon, len(answers), equal, verdict.first_differences,
        round(worst, 4), round(control, 4),
    )  # fmt: skip


def _max_regret(baseline: Backend, cell: Cell, answers: Sequence[Answer]) -> float:
    outputs = {(a.prompt, tuple(a.tokens or ())) for a in answers}
    scores = [baseline.regrets(prompt, list(tokens), cell) for prompt, tokens in outputs if tokens]
    return max((regret for one in scores for regret in one), default=0.0)
