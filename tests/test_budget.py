"""The price list, the calibrated gain, and the controller on traces of rounds.

Costs in the traces are those of the default target on two cores (see `_VERIFY`), with noise;
what a tree commits is drawn from the drafter's own distribution, or from nothing like it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.accept import accept_path
from ddtree.budget import (
    CHAIN,
    PLAIN,
    TREE,
    Arm,
    BudgetError,
    Controller,
    Curve,
    Evidence,
    EvidenceReader,
    Gain,
    Measurement,
    Served,
    StepCost,
    arms_up_to,
    never_falling,
)
from ddtree.tree import build_chain, build_tree

VOCABULARY, BLOCK = 64, 6
ARMS = arms_up_to(33, BLOCK)


# The price list


@given(st.dictionaries(st.integers(1, 300), st.lists(st.floats(1e-4, 1), min_size=1, max_size=9),
                       min_size=1, max_size=9))  # fmt: skip
def test_a_cost_never_falls_with_the_tokens(samples: dict[int, list[float]]) -> None:
    curve = Curve.fit(samples)
    costs = [curve(size) for size in range(1, 400)]
    assert all(late >= early - 1e-12 for early, late in pairwise(costs))
    assert costs[0] > 0


def test_a_curve_is_the_median_of_what_was_measured() -> None:
    samples = {1: [0.05, 0.05, 0.9], 16: [0.06, 0.061, 0.059], 64: [0.1, 0.1, 0.1]}
    curve = Curve.fit(samples)
    assert [curve(size) for size in samples] == pytest.approx([0.05, 0.06, 0.1])
    assert curve(40) == pytest.approx(0.08)
    assert curve(128) == pytest.approx(0.1 + 64 * 0.04 / 48)
    assert curve.spread[0] > curve.spread[1]


def test_steps_stay_where_the_data_say_so_and_noise_is_ironed_out() -> None:
    """A GPU's costs rise in steps (tiles); a dent within the noise of its median is no step."""
    steps = {n: [0.01 if n <= 64 else 0.02] * 9 for n in (16, 32, 64, 65, 96, 128)}
    assert [Curve.fit(steps)(n) for n in (64, 65, 128)] == pytest.approx([0.01, 0.02, 0.02])
    jitter = [-0.004, -0.002, 0.0, 0.002, 0.004]
    dented = {n: [0.04 + n * 1e-3 + j for j in jitter] for n in (1, 16, 32, 64)}
    dented[16] = [seconds + 0.001 for seconds in dented[16]]
    curve = Curve.fit(dented)
    assert [curve(n) for n in (1, 16, 32, 64)] == pytest.approx([0.041, 0.056, 0.072, 0.104])
    dented[16] = [seconds + 0.02 for seconds in dented[16]]
    assert Curve.fit(dented)(16) > 0.07


def test_pooling_keeps_the_weighted_mean() -> None:
    values, weights = [3.0, 1.0, 2.0, 5.0, 4.0], [1, 3, 1, 2, 2]
    fitted = never_falling(values, weights)
    assert fitted == sorted(fitted)
    means = [sum(v * w for v, w in zip(x, weights, strict=True)) for x in (values, fitted)]
    assert means[0] == pytest.approx(means[1])


def _measurements() -> Iterator[Measurement]:
    rng = random.Random(1)
    for _ in range(7):
        for context in (128, 512):
            for size in (1, 9, 33, 65):
                cost = 0.048 + 8e-4 * size + 2e-5 * context
                yield Measurement("verify", size, context, cost * rng.uniform(0.98, 1.02))
                yield Measurement("rest", size, context, 2e-3)
            yield Measurement("draft", BLOCK, context, 9e-3)
            yield Measurement("draft", 2 * BLOCK, context, 9e-3)
    yield Measurement("verify", 9, 128, 4.0)  # somebody else had the machine


def test_fitted_costs_predict_rounds_and_survive_an_outlier(tmp_path: Path) -> None:
    costs = StepCost.fit(_measurements(), {"target": "T", "dtype": "float32"})
    for arm, batch, context in ((Arm(TREE, 9), 2, 300), (Arm(PLAIN, 1), 1, 128)):
        wanted = 0.048 + 8e-4 * batch * arm.width + 2e-5 * context + (0.011 if arm.drafts else 0)
        assert costs.round_seconds(arm, batch, BLOCK, context) == pytest.approx(wanted, rel=0.03)
    path = tmp_path / "cache" / "costs.json"
    costs.save(path)
    assert StepCost.load(path, {"target": "T"}) == costs
    with pytest.raises(BudgetError, match="is for target 'T' and this is 'U'"):
        StepCost.load(path, {"target": "U"})
    path.write_text(path.read_text()[:50])
    with pytest.raises(BudgetError, match="run ddtree calibrate again"):
        StepCost.load(path, {"target": "T"})


def test_costs_need_every_stage() -> None:
    with pytest.raises(BudgetError, match="no draft, rest was measured"):
        StepCost.fit([Measurement("verify", 1, 0, 0.1)], {})


# The gain


class World:
    """A drafter and a target: draws rounds, and knows what every arm would commit on average.

    Args:
        sharpness: of the drafter's distributions.
        honest: the target follows the drafter's own distribution; otherwise it says what no
            drafter knows.
    """

    def __init__(self, sharpness: float, *, honest: bool, seed: int = 0) -> None:
        self.sharpness, self.honest = sharpness, honest
        self._random = torch.Generator().manual_seed(seed)
        self._reader = EvidenceReader([a.width for a in ARMS if a.kind == TREE], BLOCK - 1, "cpu")

    def round(self, arm: Arm, batch: int) -> tuple[Evidence, torch.Tensor]:
        """Evidence of a drafted round, and the tokens each request committed."""
        logits = self.sharpness * torch.randn(batch, BLOCK - 1, VOCABULARY, generator=self._random)
        root = torch.zeros(batch, dtype=torch.int64)
        if arm.kind == CHAIN:
            built = tree = build_chain(logits, root)
        else:
            built = build_tree(logits, root, 32)
            tree = built.first(arm.width)
        path = accept_path(tree, self._choices(logits, tree.depths))
        evidence = Evidence(*self._reader.read(built, path.path).unbind(0))
        return evidence, path.lengths

    def _choices(self, logits: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """One continuation per request: the token wanted after a node is that of its depth."""
        if not self.honest:
            return torch.full_like(depths, VOCABULARY)
        rows = logits.softmax(-1).flatten(0, 1)
        wanted = torch.multinomial(rows, 1, generator=self._random).view(len(logits), -1)
        return torch.nn.functional.pad(wanted, (0, 1)).gather(1, depths)


def test_evidence_counts_every_node_once_and_knows_the_chain() -> None:
    """Against a walk in plain Python."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, 16, generator=generator)
    tree = build_tree(logits, torch.zeros(5, dtype=torch.int64), 16)
    wanted = logits.argmax(-1)
    wanted[2:, 1:] = torch.randint(16, (3, 3), generator=generator)
    choices = torch.nn.functional.pad(wanted, (0, 1)).gather(1, tree.depths)
    path = accept_path(tree, choices).path
    widths = [5, 9, 17]
    predicted, accepted = EvidenceReader(widths, 4, "cpu").read(tree, path)
    wanted_predicted, wanted_accepted = torch.zeros(4, 4), torch.zeros(4, 4)
    for row in range(5):
        on_chain = {0}
        for node in range(1, 17):
            depth = int(tree.depths[row, node]) - 1
            band = 1 + sum(node >= width for width in widths)
            chance = tree.scores[row, node].exp()
            is_chain = int(tree.parents[row, node]) in on_chain and (
                tree.tokens[row, node] == logits[row, depth].argmax()
            )
            taken = node in path[row].tolist()
            wanted_predicted[band, depth] += chance
            wanted_accepted[band, depth] += taken
            if is_chain:
                on_chain.add(node)
                wanted_predicted[0, depth] += chance
                wanted_accepted[0, depth] += taken
    torch.testing.assert_close(predicted, wanted_predicted)
    torch.testing.assert_close(accepted, wanted_accepted)


@pytest.mark.parametrize("arm", [Arm(TREE, 9), Arm(TREE, 33)], ids=str)
def test_one_arms_rounds_tell_what_the_others_commit(arm: Arm) -> None:
    """With an honest drafter, also what wider trees than those verified would commit."""
    world, gain = World(3.0, honest=True), Gain(ARMS, BLOCK - 1)
    for _ in range(60):
        gain.observe(arm, 8, world.round(arm, 8)[0])
    for other, expected in zip(ARMS[1:], gain.expected[1:], strict=True):
        seen = world.round(other, 4000)[1].float().mean()
        assert expected == pytest.approx(float(seen), rel=0.06), other


def test_an_over_confident_drafter_is_believed_less_and_less() -> None:
    world, gain = World(6.0, honest=False), Gain(ARMS, BLOCK - 1)
    for count in range(1, 61):
        gain.observe(Arm(TREE, 33), 1, world.round(Arm(TREE, 33), 1)[0])
        if count == 4:
            assert max(gain.expected) < 2.3
    assert max(gain.expected) < 1.25
    assert min(gain.expected) >= 1


# The controller

# Seconds of one forward of n tokens, default target, bf16, two cores.
_VERIFY = Curve((1, 8, 16, 32, 64, 128, 256),
                (0.0476, 0.058, 0.059, 0.070, 0.098, 0.164, 0.279), (0.0,) * 7)  # fmt: skip
_TRUE = StepCost(
    verify=_VERIFY,
    draft=Curve((5, 80), (0.008, 0.03), (0.0, 0.0)),
    rest=Curve((5, 256), (0.002, 0.006), (0.0, 0.0)),
)


class Trace:
    """Rounds of a controller in a world, and their time in seconds."""

    def __init__(self, controller: Controller, world: World, seed: int = 0) -> None:
        self.controller, self.world = controller, world
        self._noise = random.Random(seed)
        self.arms: list[Arm] = []
        self.seconds = self.tokens = 0.0

    def run(self, rounds: int, batch: int, *, pace: float = 1.0) -> Counter[Arm]:
        """Serve that many rounds, each `pace` times as long as usual; the arms used."""
        used: Counter[Arm] = Counter()
        self.seconds = self.tokens = 0.0
        for _ in range(rounds):
            arm = self.controller.choose(batch)
            seconds = pace * _TRUE.round_seconds(arm, batch, BLOCK)
            self.seconds += seconds
            evidence, committed = (
                self.world.round(arm, batch) if arm.drafts else (None, torch.ones(batch))
            )
            self.tokens += float(committed.sum())
            # Every twentieth round somebody else had the machine.
            hiccup = 3.0 if self._noise.random() < 0.05 else 1.0
            measured = seconds * hiccup * self._noise.uniform(0.95, 1.05)
            self.controller.observe(Served(arm, batch, 0, measured, evidence))
            used[arm] += 1
            self.arms.append(arm)
        return used

    @property
    def rate(self) -> float:
        """Tokens per second of the last run."""
        return self.tokens / self.seconds


@cache
def committed(sharpness: float) -> dict[Arm, float]:
    """Tokens that every arm commits on average, with an honest drafter."""
    world = World(sharpness, honest=True, seed=1)
    return {
        arm: float(world.round(arm, 3000)[1].float().mean()) if arm.drafts else 1.0 for arm in ARMS
    }


def best_rate(sharpness: float, batch: int) -> float:
    """Tokens per second of the best arm, if it were always taken."""
    return max(
        batch * tokens / _TRUE.round_seconds(arm, batch, BLOCK)
        for arm, tokens in committed(sharpness).items()
    )


def new_controller(prior: StepCost | None = None) -> Controller:
    return Controller(ARMS, BLOCK, prior or StepCost.assumed())


@pytest.mark.parametrize("prior", [None, _TRUE], ids=["assumed", "calibrated"])
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0])
def test_never_much_slower_than_the_best_arm_through_abrupt_loads(
    sharpness: float, prior: StepCost | None
) -> None:
    shares = []
    for seed in range(3):
        trace = Trace(new_controller(prior), World(sharpness, honest=True, seed=seed), seed)
        trace.run(60, batch=1)
        for batch in (1, 16, 1, 4, 32, 2):
            trace.run(20, batch)  # may find its way
            used = trace.run(50, batch)
            # By what the arms commit on average, so that luck does not decide.
            tokens = batch * sum(count * committed(sharpness)[arm] for arm, count in used.items())
            shares.append(tokens / trace.seconds / best_rate(sharpness, batch))
    # Hiccups of the machine in a row may lead to the best arm's neighbour, some 12 % slower.
    assert min(shares) >= 0.88, shares
    assert sum(shares) / len(shares) >= 0.97, shares


@pytest.mark.parametrize("sharpness", [0.5, 3.0, 8.0])
def test_an_untrained_drafter_costs_next_to_nothing(sharpness: float) -> None:
    """From the first round on, its confidence notwithstanding."""
    trace = Trace(new_controller(), World(sharpness, honest=False))
    used = trace.run(600, batch=1)
    plain = 1 / _TRUE.round_seconds(Arm(PLAIN, 1), 1, BLOCK)
    assert trace.rate >= 0.965 * plain
    drafted = used.total() - used[Arm(PLAIN, 1)]
    assert 4 < drafted < 40
    if sharpness > 1:
        # Once it is known, what is lost is the probes' share.
        trace.run(600, batch=1)
        assert trace.rate >= 0.98 * plain


@pytest.mark.parametrize("spell", [6, 20])
def test_a_slow_spell_of_the_machine_does_not_make_drafting_look_cheap(spell: int) -> None:
    """Plain rounds are measured in it and drafted ones were not, but they cannot cost less."""
    trace = Trace(new_controller(), World(3.0, honest=False))
    trace.run(300, batch=16)
    used = trace.run(spell, batch=16, pace=4.0) + trace.run(100, batch=16)
    assert used.total() - used[Arm(PLAIN, 1)] < 10, used


def drift(rounds: int, seed: int) -> Iterator[float]:
    """Paces of a machine that is some 20 % slower or faster at one time than fifty rounds later."""
    draw, state = random.Random(seed), 0.0
    for _ in range(rounds):
        state += draw.gauss(0, 0.2) - state / 50
        yield exp(0.2 * state)


@pytest.mark.parametrize(
    ("sharpness", "honest"), [(8.0, False), (2.0, True), (3.0, True), (4.0, True)]
)
def test_a_machine_that_changes_its_pace_misleads_nobody(sharpness: float, honest: bool) -> None:
    """Arms are told apart that differ by less than the machine does from one time to another."""
    shares = []
    tokens = committed(sharpness) if honest else dict.fromkeys(ARMS, 1.0)
    rate = max(tokens[arm] / _TRUE.round_seconds(arm, 1, BLOCK) for arm in ARMS)
    for seed in range(6):
        trace = Trace(new_controller(), World(sharpness, honest=honest), seed)
        got = best = 0.0
        for pace in drift(800, seed):
            got += sum(tokens[arm] for arm in trace.run(1, batch=1, pace=pace))
            best += trace.seconds / pace * rate
        shares.append(got / best)
    assert min(shares) >= 0.97, shares


def test_probes_find_a_drafter_that_has_become_good() -> None:
    trace = Trace(new_controller(), World(4.0, honest=False))
    trace.run(600, batch=1)
    trace.world = World(6.0, honest=True)
    trace.run(1000, batch=1)
    used = trace.run(100, batch=1)
    assert used[Arm(PLAIN, 1)] < 10


def test_the_choice_does_not_flutter() -> None:
    """Arms that are equally good within the noise are not switched between."""
    trace = Trace(new_controller(_TRUE), World(2.0, honest=True))
    trace.run(100, batch=4)
    held = []
    for _ in range(400):
        trace.run(1, batch=4)
        held.append(trace.controller.current)
    switches = sum(a != b for a, b in pairwise(held))
    assert switches <= 12


def test_a_busy_batch_takes_narrower_trees() -> None:
    trace = Trace(new_controller(_TRUE), World(3.0, honest=True))
    widths: dict[int, float] = {}
    for batch in (1, 32):
        trace.run(50, batch)
        used = trace.run(100, batch)
        widths[batch] = median(arm.width for arm in used.elements())
    assert widths[32] < widths[1]


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    def arms() -> list[Arm]:
        trace = Trace(new_controller(), World(3.0, honest=True))
        for batch in (1, 8, 2):
            trace.run(60, batch)
        return trace.arms

    assert arms() == arms()
