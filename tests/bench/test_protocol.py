"""What the protocol promises: turns, warm-up, flushes, and no comparison of unequal outputs."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from ddtree.bench.gate import first_difference
from ddtree.bench.measure import measure
from ddtree.bench.plan import (
    BenchError,
    Cell,
    Contender,
    Plan,
    cells,
    contenders,
    endpoints,
    parse_contender,
)
from ddtree.bench.prompts import load_prompts

from .scripted import Scripted, counting

GREEDY = Cell()


def run(backends, conditions=(GREEDY,), prompts=6, **plan):
    return list(measure(backends, list(conditions), prompts, Plan(**plan), keep=True))


def pair(calls=None, **second):
    calls = [] if calls is None else calls
    return [Scripted("plain", calls), Scripted("tree", calls, rate=200, budget=8, **second)]


def test_contenders_take_turns_on_the_same_prompts_in_rotating_order():
    calls: list = []
    three = [Scripted(name, calls) for name in "ABC"]
    (results,) = run(three, prompts=4, warmup=0, repeats=2)
    turns = [(who, what) for who, what in calls if isinstance(what, list)]
    for name in "ABC":
        turns.remove((name, [0]))  # its warm-up
    groups = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert [{tuple(p) for _, p in group} for group in groups] == [{(n % 4,)} for n in range(8)]
    assert ["".join(who for who, _ in group) for group in groups][:4] == [
        "ABC",
        "BCA",
        "CAB",
        "ABC",
    ]
    assert [len(result.visits) for result in results] == [8, 8, 8]


def test_every_visit_starts_with_an_empty_cache_and_warm_up_is_not_measured():
    calls: list = []
    (results,) = run(pair(calls), prompts=3, warmup=2)
    for label in ("plain", "tree"):
        own = [what for who, what in calls if who == label]
        asked = [what for what in own if what not in ("open", "close")]
        assert asked == [[0, 1], "flush", [0], "flush", [1], "flush", [2]]
        assert (own[0], own[-1]) == ("open", "close")
    assert [answer.prompt for answer in results[0].answers] == [0, 1, 2]
    # Warm-up rounds are not in the ledger either.
    assert results[1].ledger.rounds == sum(results[1].histogram.values())


def test_above_one_request_in_flight_a_turn_is_four_times_as_many_prompts():
    assert [list(b) for b in Plan().blocks(5, 1)] == [[0], [1], [2], [3], [4]]
    assert [len(b) for b in Plan().blocks(20, 2)] == [8, 8, 4]
    assert [len(b) for b in Plan(block=10).blocks(20, 8)] == [10, 10]


def test_everything_is_closed_when_a_visit_fails():
    calls: list = []

    def broken(prompt, cell):
        raise BenchError("gone")

    with pytest.raises(BenchError, match="gone"):
        run([Scripted("plain", calls), Scripted("tree", calls, script=broken)])
    assert {who for who, what in calls if what == "close"} == {"plain", "tree"}


def test_one_at_a_time_never_has_two_contenders_open():
    calls: list = []
    (results,) = measure(pair(calls), [GREEDY], 3, Plan(block=2, warmup=1), keep=False)
    is_open: set[str] = set()
    for label, what in calls:
        if what == "open":
            is_open.add(label)
            assert is_open == {label}
        elif what == "close":
            is_open.discard(label)
        else:
            assert is_open == {label}, "asked while closed"
    assert not is_open
    assert [len(visit.answers) for visit in results[1].visits] == [2, 1]
    assert results[1].verdict.passed is True


def flipped(prompt, cell):
    tokens = counting(prompt, cell)
    return [*tokens[:5], -1, *tokens[6:]] if prompt == 2 else tokens


def test_equal_outputs_pass_the_gate_of_float32():
    (results,) = run(pair())
    assert (results[1].verdict.gate, results[1].verdict.passed) == ("equal", True)
    assert (results[1].verdict.equal, results[1].verdict.outputs) == (6, 6)


def test_one_wrong_token_in_float32_is_refused_and_located():
    (results,) = run(pair(script=flipped))
    verdict = results[1].verdict
    assert verdict.passed is False
    assert (verdict.equal, verdict.first_differences) == (5, (5,))
    assert "REFUSED" in str(verdict)


@pytest.mark.parametrize(("regret", "passed"), [(0.125, True), (3.0, False)])
def test_in_bfloat16_a_near_tie_passes_and_a_wrong_token_does_not(regret, passed):
    plain = Scripted("plain", [], dtype="bfloat16", regret=regret)
    (results,) = run([plain, Scripted("tree", [], script=flipped, dtype="bfloat16")])
    verdict = results[1].verdict
    assert (verdict.gate, verdict.passed, verdict.max_regret) == ("regret", passed, regret)
    assert verdict.baseline_regret == 0.0


def test_a_truncated_output_is_a_difference():
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([1, 2], [1, 2]) is None
    (results,) = run(pair(script=lambda p, c: counting(p, c)[:-1]))
    assert results[1].verdict.passed is False


def test_sampled_cells_inherit_the_greedy_verdict_of_their_concurrency():
    def sampled(prompt, cell):
        return counting(prompt, cell) if cell.greedy else [7, 7, 7]

    backends = [Scripted("plain", [], script=sampled), Scripted("tree", [], script=flipped)]
    found = run(backends, cells([1, 2], [0.0, 1.0], [None])[:3], prompts=8)
    assert [results[1].verdict.passed for results in found] == [False, False, False]
    (unknown,) = run(backends, [Cell(temperature=1.0)])
    assert unknown[1].verdict.passed is None
    assert str(unknown[1].verdict) == "not checked"


def test_an_endpoint_that_cannot_score_needs_another_gate():
    plain = Scripted("plain", [], dtype="bfloat16")
    plain.can_score = False
    with pytest.raises(BenchError, match="--gate equal"):
        run([plain, Scripted("tree", [])], gate="regret")


def test_contenders_from_text():
    assert [one.label for one in contenders(["ar", "ddtree"], [8, 32])] == [
        "ar", "ddtree:8", "ddtree:32",
    ]  # fmt: skip
    text = "seeded=ddtree:16 DDTREE_CHAIN_SEED=1 --page-size 16"
    expected = Contender(
        "seeded", "ddtree", 16, ("--page-size", "16"), (("DDTREE_CHAIN_SEED", "1"),)
    )
    assert parse_contender(text) == expected
    assert endpoints(["a=http://x:1/"])[0].url == "http://x:1"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: contenders(["beam"], []), "beam"),
        (lambda: contenders(["ar"], [], ["ar=ar"]), "two contenders are called ar"),
        (lambda: parse_contender("x=tree:8"), "tree:8"),
        (lambda: parse_contender("x"), "LABEL=MODE"),
        (lambda: endpoints(["localhost:3000"]), "LABEL=http"),
        (lambda: Plan(repeats=0), "repeats is 0"),
        (lambda: cells([0], [0.0], [None]), "concurrency"),
        (lambda: load_prompts("gsm9k"), "gsm9k.*gsm8k, math500"),
    ],
)
def test_mistakes_are_named(make, named):
    with pytest.raises(BenchError, match=named):
        make()
