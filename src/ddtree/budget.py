"""How many nodes to verify: what a round costs, what it commits, and the choice between them.

Plain decoding, the drafter's chain and trees of several widths are the *arms* of a choice that is
made anew every round. An arm is worth its expected committed tokens per second:

* `StepCost` is the price list: seconds of a verify forward by tokens, of drafting and of the rest
  of a round, measured by `ddtree calibrate`. `RoundCosts` corrects it with served rounds, and
  tells the machine's pace from the arms' costs.
* `Gain` is what a round commits. A tree's expected length is the sum of its prefixes'
  probabilities (arXiv 2604.12989, Proposition 1) if the drafter's probabilities are honest; here
  they are scaled to the acceptance that was seen. Nodes come in order of score, so the first n
  nodes of a tree are the tree of n nodes, and one verified tree tells what every narrower one
  would have committed.
* `Controller` chooses. It is a function of what it was told, so recorded rounds drive it in tests.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from math import exp, log, log2
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ddtree.tree import DraftTree

# Widths of trees to choose from, up to the launch width, which is always one of them.
WIDTHS = (5, 9, 17, 33, 65, 129)
PLAIN, CHAIN, TREE = "plain", "chain", "tree"


class BudgetError(ValueError):
    """A calibration cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Arm:
    """One way to run a round: `kind` plain, chain or tree, and tokens verified per request."""

    kind: str
    width: int

    def __str__(self) -> str:
        return self.kind if self.kind == PLAIN else f"{self.kind}{self.width}"

    @property
    def drafts(self) -> bool:
        """Whether the drafter runs."""
        return self.kind != PLAIN


def arms_up_to(width: int, block_size: int) -> tuple[Arm, ...]:
    """Plain decoding, the drafter's chain, and trees up to the launch width."""
    widths = [w for w in WIDTHS if w < width] + [width]
    chain = Arm(CHAIN, min(width, block_size))
    return (Arm(PLAIN, 1), chain, *(Arm(TREE, w) for w in widths))


# What a round costs


@dataclass(frozen=True)
class Curve:
    """Seconds by size: measured medians, never falling, convex where the data say so.

    Attributes:
        sizes: in ascending order.
        seconds: at each size.
        spread: half the interquartile range of the measurements at each size, seconds.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]

    @classmethod
    def fit(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """From seconds measured at each size.

        Raises:
            BudgetError: nothing was measured.
        """
        sizes = sorted(size for size, values in samples.items() if values)
        if not sizes:
            raise BudgetError("a cost curve needs at least one measurement; there is none")
        medians = [median(samples[size]) for size in sizes]
        spread = [_half_iqr(samples[size]) for size in sizes]
        counts = [len(samples[size]) for size in sizes]
        rising = never_falling(medians, counts)
        # Two standard errors of a median: closer than that, a dent above the convex hull is noise.
        noise = [2 * 1.25 * s / 0.674 / n**0.5 for s, n in zip(spread, counts, strict=True)]
        hull = _convex_hull(sizes, rising)
        smooth = [
            h if r - h <= n else r for r, h, n in zip(rising, hull, noise, strict=True)
        ]  # fmt: skip
        return cls(tuple(sizes), tuple(never_falling(smooth, counts)), tuple(spread))

    def __call__(self, size: float) -> float:
        """Interpolated; beyond the ends proportional, or along the last slope if that is more."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            slope = seconds[-1] / sizes[-1]
            if len(sizes) > 1:
                slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return seconds[-1] + slope * (size - sizes[-1])
        right = bisect_left(sizes, size)
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The weighted least-squares sequence that never falls (pool adjacent violators)."""
    pools: list[list[float]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, mass, members = pools.pop()
            before = pools[-1]
            total = before[1] + mass
            pools[-1] = [
                (before[0] * before[1] + mean * mass) / total, total, before[2] + members
            ]  # fmt: skip
    return [mean for mean, _, members in pools for _ in range(int(members))]


def _convex_hull(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    """The largest convex function below the points, at the points."""
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (sizes[i] - sizes[a]) < (values[i] - values[a]) * (
                sizes[b] - sizes[a]
            ):
                break
            hull.pop()
        hull.append(i)
    below = list(values)
    for a, b in pairwise(hull):
        for i in range(a + 1, b):
            share = (sizes[i] - sizes[a]) / (sizes[b] - sizes[a])
            below[i] = values[a] + share * (values[b] - values[a])
    return below


def _half_iqr(values: Sequence[float]) -> float:
    low, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.75], dtype=torch.float64)
    )
    return float(high - low) / 2


@dataclass(frozen=True)
class Measurement:
    """One timed piece of work.

    Attributes:
        stage: ``verify``, ``draft`` or ``rest`` (build, accept and commit of a drafted round).
        size: tokens: batch x width of a verify or of a round's rest, batch x block of a draft.
        context: committed tokens attended to, summed over the batch.
        seconds: how long it took.
    """

    stage: str
    size: int
    context: int
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """What the parts of a round cost on one machine.

    Attributes:
        verify, draft, rest: see `Measurement`; `verify` at a context of `context` tokens.
        context: committed tokens that `verify` was measured with.
        per_context: seconds of a verify per further committed token.
        key: what it was measured for: target, drafter, device, dtype, versions.
    """

    verify: Curve
    draft: Curve
    rest: Curve
    context: int = 0
    per_context: float = 0.0
    key: dict[str, str] = field(default_factory=dict)

    @classmethod
    def assumed(cls) -> StepCost:
        """The shape of a round's cost where none was measured; only ratios mean anything.

        A verify of 64 tokens costs two steps; a drafter is a fifth of its target.
        """
        return cls(
            verify=Curve((1, 65), (1.0, 2.0), (0.0, 0.0)),
            draft=Curve((1, 65), (0.2, 0.4), (0.0, 0.0)),
            rest=Curve((1, 65), (0.02, 0.06), (0.0, 0.0)),
        )

    @classmethod
    def fit(cls, measurements: Iterable[Measurement], key: Mapping[str, str]) -> StepCost:
        """Robust curves through the measurements of each stage.

        The slope over the context is the median of the slopes between contexts at equal size
        (Theil-Sen), and never negative.

        Raises:
            BudgetError: a stage was not measured.
        """
        stages: dict[str, dict[tuple[int, int], list[float]]] = {}
        for one in measurements:
            cell = stages.setdefault(one.stage, {}).setdefault((one.size, one.context), [])
            cell.append(one.seconds)
        missing = {"verify", "draft", "rest"} - stages.keys()
        if missing:
            raise BudgetError(f"no {', '.join(sorted(missing))} was measured; measure every stage")
        verify = stages["verify"]
        context = min(c for _, c in verify)
        slope = _context_slope(verify)
        level: dict[int, list[float]] = {}
        for (size, at), values in verify.items():
            level.setdefault(size, []).extend(v - slope * (at - context) for v in values)
        others = {
            stage: {size: values for (size, _), values in stages[stage].items()}
            for stage in ("draft", "rest")
        }
        return cls(
            Curve.fit(level), Curve.fit(others["draft"]), Curve.fit(others["rest"]),
            context, slope, dict(key),
        )  # fmt: skip

    def round_seconds(self, arm: Arm, batch: int, block_size: int, context: int = 0) -> float:
        """Seconds of a round of `batch` requests with `context` committed tokens in all."""
        tokens = batch * arm.width
        seconds = self.verify(tokens) + self.per_context * max(0, context - self.context)
        if arm.drafts:
            seconds += self.draft(batch * block_size) + self.rest(tokens)
        return seconds

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, key: Mapping[str, str]) -> StepCost:
        """Read what `save` wrote for the same key.

        Raises:
            BudgetError: the file is damaged or was measured for something else.
        """
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            curves = {
                name: Curve(*(tuple(stored[name][f]) for f in ("sizes", "seconds", "spread")))
                for name in ("verify", "draft", "rest")
            }
            found = cls(
                **curves, context=int(stored["context"]),
                per_context=float(stored["per_context"]), key=dict(stored["key"]),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BudgetError(
                f"the calibration {path} cannot be read ({error}); run ddtree calibrate again"
            ) from None
        for name, value in key.items():
            if found.key.get(name) != value:
                raise BudgetError(
                    f"the calibration {path} is for {name} {found.key.get(name)!r} and this is "
                    f"{value!r}; run ddtree calibrate again"
                )
        return found


def _context_slope(cells: Mapping[tuple[int, int], Sequence[float]]) -> float:
    by_size: dict[int, list[tuple[int, float]]] = {}
    for (size, context), values in sorted(cells.items()):
        by_size.setdefault(size, []).append((context, median(values)))
    slopes = [
        (late - early) / (far - near)
        for points in by_size.values()
        for (near, early), (far, late) in pairwise(points)
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


class RoundCosts:
    """The price list, corrected by served rounds.

    A round takes its listed price, times the machine's pace at the time, times a factor of its arm
    at its load. Arms are mostly measured at different times, and a machine that others use changes
    its pace by more than arms differ, so both are estimated together: a Kalman filter over their
    logarithms, in which the pace wanders from round to round and the factors, alike for arms and
    loads that are alike, hardly move. Rounds in a row at one pace thus tell what the arms are to
    each other, and a slow spell tells nothing.

    Args:
        arms: the arms in the order of `estimate`'s result.
        prior: from a calibration, or `StepCost.assumed`; its scale need not be right.
    """

    # Standard deviations of logarithms: factors, one round's pace from the last one's, and noise.
    _FACTOR, _STEP, _NOISE = 0.2, 0.08, 0.05
    # A round that differs from what was expected by more deviations than this counts as if by this.
    _LIMIT = 1.5
    # Factors go back to the price list by this share every round, or what is unused would stay.
    _FORGET = 1 / 2000
    # As many steps of `_load` are told apart: batches up to 256.
    _LOADS = 17

    def __init__(self, arms: Sequence[Arm], prior: StepCost, block_size: int) -> None:
        self._arms = list(arms)
        self._prior = prior
        self._block_size = block_size
        self._widest_first = sorted(range(len(arms)), key=lambda i: -arms[i].width)
        loads = torch.arange(self._LOADS, dtype=torch.float64)
        self._factors = self._FACTOR**2 * torch.kron(_alike(loads, 6.0), self._alike_arms())
        # The pace comes first, then every load's arms; nothing is known of the pace.
        self._mean = torch.zeros(1 + len(self._factors), dtype=torch.float64)
        self._covariance = torch.block_diag(torch.full((1, 1), 25.0), self._factors)

    def _alike_arms(self) -> Tensor:
        """Correlations of the arms' factors: by width, and little between plain and drafted."""
        widths = torch.tensor([log2(arm.width) for arm in self._arms], dtype=torch.float64)
        drafts = torch.tensor([arm.drafts for arm in self._arms])
        alike = _alike(widths, 3.0) * torch.where(drafts[:, None] == drafts, 1.0, 0.3)
        return 0.95 * alike + 0.05 * torch.eye(len(widths))

    def _places(self, batch: int) -> slice:
        first = 1 + min(_load(batch), self._LOADS - 1) * len(self._arms)
        return slice(first, first + len(self._arms))

    def observe(self, arm: Arm, batch: int, context: int, seconds: float) -> None:
        """Take note of one served round."""
        mean, covariance = self._mean, self._covariance
        mean[1:] *= 1 - self._FORGET
        covariance[0, 1:] *= 1 - self._FORGET
        covariance[1:, 0] *= 1 - self._FORGET
        covariance[1:, 1:].lerp_(self._factors, 2 * self._FORGET)
        covariance[0, 0] += self._STEP**2
        place = self._places(batch).start + self._arms.index(arm)
        column = covariance[0] + covariance[place]
        variance = float(column[0] + column[place]) + self._NOISE**2
        listed = self._prior.round_seconds(arm, batch, self._block_size, context)
        surprise = log(seconds / listed) - float(mean[0] + mean[place])
        variance *= max(1.0, abs(surprise) / variance**0.5 / self._LIMIT)
        mean.add_(column, alpha=surprise / variance)
        covariance.addr_(column, column, alpha=-1 / variance)

    def estimate(self, batch: int, context: int) -> list[float]:
        """Seconds of a round by arm, at the present pace.

        A narrower arm never costs more than a wider one, and half of what plain rounds, the
        narrowest, save by the price list is never doubted, or nothing would lead back to them.
        """
        listed = [
            self._prior.round_seconds(arm, batch, self._block_size, context) for arm in self._arms
        ]
        factors = (self._mean[0] + self._mean[self._places(batch)]).exp().tolist()
        seconds = [factor * price for factor, price in zip(factors, listed, strict=True)]
        for wide, narrow in pairwise(self._widest_first):
            most = seconds[wide]
            if not self._arms[narrow].drafts:
                most *= (1 + min(1.0, listed[narrow] / listed[wide])) / 2
            seconds[narrow] = min(seconds[narrow], most)
        return seconds


def _alike(places: Tensor, reach: float) -> Tensor:
    """Correlations that fall exponentially with the distance of `places`, float [N, N]."""
    return (-(places[:, None] - places).abs() / reach).exp()


def _load(batch: int) -> int:
    """Batches within about a fifth of each other count as one load: 1, 2, 3, 4, 6, 8, 11, ..."""
    return round(2 * log2(batch))


# What a round commits


@dataclass(frozen=True)
class Evidence:
    """What one drafted round said about the drafter, summed over its requests.

    Row 0 is the chain, the others are bands of nodes by rank, one for each tree arm: the nodes that
    arm has and narrower ones have not. Columns are depths from 1.

    Attributes:
        predicted: the drafter's probability of the nodes, float [1 + bands, depths].
        accepted: nodes the target accepted, likewise.
    """

    predicted: Tensor
    accepted: Tensor


class EvidenceReader:
    """Reads `Evidence` off trees on their device, without a synchronisation.

    Args:
        widths: of the tree arms, ascending.
        depths: the drafter's horizon.
    """

    def __init__(self, widths: Sequence[int], depths: int, device: torch.device | str) -> None:
        ranks = torch.arange(max(widths))
        # Band of each node by its rank; the root's score counts for nothing below.
        bands = torch.bucketize(ranks, torch.tensor(widths) - 1)
        self._offsets = (bands * depths).to(device)
        self._places = torch.arange(depths, device=device)
        self._shape = (2, 1 + len(widths), depths)

    def read(self, tree: DraftTree, path: Tensor) -> Tensor:
        """Evidence of a batch as one tensor float32 [2, 1 + bands, depths], on the device.

        Args:
            tree: as built, at the widest width, whatever part of it was verified.
            path: accepted nodes, int64 [B, places], root first, padded with -1.
        """
        out = tree.scores.new_zeros(self._shape)
        chances = tree.scores[:, 1:].exp()  # 0 where invalid
        columns = (tree.depths[:, 1:] - 1).clamp_(min=0)
        cells = self._offsets[1 : tree.width] + columns
        out[0, 1:].view(-1).index_add_(0, cells.flatten(), chances.flatten())
        # The chain's node is the most probable one of its depth.
        chain = out.new_zeros(len(chances), out.shape[2])
        chain.scatter_reduce_(1, columns, chances, "amax")
        torch.sum(chain, 0, out=out[0, 0])
        steps = path[:, 1 : self._shape[2] + 1]
        if not steps.shape[1]:
            return out
        taken = (steps > 0).to(out.dtype)
        nodes = (steps - 1).clamp_(min=0)
        cells = self._offsets[nodes + 1] + self._places[: steps.shape[1]]
        out[1, 1:].view(-1).index_add_(0, cells.flatten(), taken.flatten())
        on_chain = chances.gather(1, nodes) >= chain[:, : steps.shape[1]]
        torch.sum(on_chain * taken, 0, out=out[1, 0, : steps.shape[1]])
        return out


class Gain:
    """Expected committed tokens per request and round by arm, calibrated to what was accepted.

    A band of nodes at one depth is expected to bring the probability that the drafter gives it,
    times accepted / predicted seen there so far; with little seen, times that ratio over all
    bands of the depth.

    Args:
        arms: the arms in the order of `expected`'s result.
        depths: the drafter's horizon.
        memory: requests' rounds that the drafter's probabilities are averaged over; the
            calibration looks back four times as far.
        caution: predicted nodes' worth of belief that the drafter is right.
    """

    def __init__(
        self, arms: Sequence[Arm], depths: int, memory: float = 64.0, caution: float = 1.0
    ) -> None:
        self._arms = list(arms)
        self._trees = [arm.width for arm in arms if arm.kind == TREE]
        self._memory, self._caution = memory, caution
        rows = 1 + len(self._trees)
        self._level = torch.zeros(rows, depths)  # decayed sum of predictions ...
        self._requests = torch.full((rows, 1), 1e-6)  # ... over so many requests' rounds
        self._seen = torch.zeros(2, rows, depths)  # predicted and accepted, where verified
        self._expected = [1.0] * len(arms)

    @property
    def expected(self) -> list[float]:
        """By arm; 1 where nothing is known."""
        return self._expected

    def observe(self, arm: Arm, batch: int, evidence: Evidence) -> None:
        """Take note of one drafted round of `batch` requests."""
        drafted = 1 if arm.kind == CHAIN else 1 + len(self._trees)
        verified = 1 if arm.kind == CHAIN else 1 + bisect_right(self._trees, arm.width)
        self._level[:drafted].mul_(exp(-batch / self._memory)).add_(evidence.predicted[:drafted])
        self._requests[:drafted].mul_(exp(-batch / self._memory)).add_(batch)
        self._seen[:, :verified].mul_(exp(-batch / self._memory / 4))
        self._seen[0, :verified].add_(evidence.predicted[:verified])
        self._seen[1, :verified].add_(evidence.accepted[:verified])
        self._update()

    def fade(self, batch: int) -> None:
        """A plain round went by: what was drafted before it counts a little less."""
        keep = exp(-batch / self._memory / 8)
        self._level.mul_(keep)
        self._requests.mul_(keep)

    def _update(self) -> None:
        bring = (self._level / self._requests * self._calibration()).sum(1).tolist()
        trees = accumulate(bring[1:], initial=1.0)
        next(trees)
        by_kind = {PLAIN: iter([1.0]), CHAIN: iter([1 + bring[0]]), TREE: trees}
        self._expected = [next(by_kind[arm.kind]) for arm in self._arms]

    def _calibration(self) -> Tensor:
        """Accepted / predicted per band and depth, float [1 + bands, depths]."""
        caution = self._caution
        predicted, accepted = self._seen
        depth = (accepted[1:].sum(0) + caution) / (predicted[1:].sum(0) + caution)
        return (accepted + caution * depth) / (predicted + caution)


# The choice


@dataclass(frozen=True)
class Served:
    """A finished round, as the controller is told of it.

    Attributes:
        arm: how it was run.
        batch: requests.
        context: committed tokens, summed over the batch.
        seconds: how long it took, or None where that is not known.
        evidence: None for plain rounds.
    """

    arm: Arm
    batch: int
    context: int
    seconds: float | None
    evidence: Evidence | None = None


class Controller:
    """Chooses the arm of each round: the most expected committed tokens per second.

    Args:
        arms: from `arms_up_to`.
        block_size: of the drafter.
        prior: the machine's price list.
        hysteresis: the present arm is kept unless another is better by this share.
        probe_share: of the time that may go into rounds of other arms, to notice that they have
            become better.
        looks: rounds that are drafted at first, whatever they cost.
    """

    # A probe that costs nothing is still not free: at least so many rounds apart.
    _REST = 16
    # Allowance is not saved up for more than so many probes.
    _SAVED_PROBES = 2

    def __init__(
        self,
        arms: Sequence[Arm],
        block_size: int,
        prior: StepCost,
        *,
        hysteresis: float = 0.03,
        probe_share: float = 0.015,
        looks: int = 4,
    ) -> None:
        self.arms = list(arms)
        self.costs = RoundCosts(arms, prior, block_size)
        self.gain = Gain(arms, block_size - 1)
        self.current = self.arms[0]
        self._hysteresis, self._probe_share = hysteresis, probe_share
        self._looks = looks
        self._allowance = 0.0  # seconds that probes may still cost
        self._round = self._last_probe = 0
        self._last_used = [0] * len(self.arms)

    def choose(self, batch: int, context: int = 0) -> Arm:
        """The arm of the next round of `batch` requests with `context` committed tokens in all."""
        self._round += 1
        seconds = self.costs.estimate(batch, context)
        arm = self._look(seconds) if self._looks else self._settle(seconds)
        self._last_used[self.arms.index(arm)] = self._round
        return arm

    def observe(self, served: Served) -> None:
        """Take note of a finished round."""
        if served.seconds is not None:
            self.costs.observe(served.arm, served.batch, served.context, served.seconds)
            self._allowance += self._probe_share * served.seconds
        if served.evidence is None:
            self.gain.fade(served.batch)
        else:
            self.gain.observe(served.arm, served.batch, served.evidence)

    def _look(self, seconds: list[float]) -> Arm:
        """A first round: the tree that would be best if every doubling brought half a token."""
        self._looks -= 1
        trees = [i for i, arm in enumerate(self.arms) if arm.kind == TREE]
        best = max(trees, key=lambda i: (1 + log2(self.arms[i].width) / 2) / seconds[i])
        return self.arms[best]

    def _settle(self, seconds: list[float]) -> Arm:
        gains = self.gain.expected
        rates = [gain / cost for gain, cost in zip(gains, seconds, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        current = self.arms.index(self.current)
        if rates[best] > rates[current] * (1 + self._hysteresis):
            current = best
            self.current = self.arms[best]
        probe = self._affordable_probe(current, seconds, rates)
        if probe is None:
            return self.current
        self._last_probe = self._round
        return self.arms[probe]

    def _affordable_probe(
        self, current: int, seconds: list[float], rates: list[float]
    ) -> int | None:
        """Another arm to look at: the best drafted one, or the one unused for longest."""
        # What the present arm would take for the tokens that a probe is expected to bring.
        excess = [
            cost - cost * rate / rates[current] for cost, rate in zip(seconds, rates, strict=True)
        ]
        self._allowance = min(self._allowance, self._SAVED_PROBES * max(excess))
        if self._round - self._last_probe < self._REST:
            return None
        others = [i for i in range(len(rates)) if i != current]
        if not self.arms[current].drafts:
            others = [max(others, key=rates.__getitem__)]
        stale = [
            i
            for i in others
            if excess[i] <= self._allowance and self._round - self._last_used[i] >= self._REST
        ]
        if not stale:
            return None
        probe = min(stale, key=self._last_used.__getitem__)
        self._allowance -= max(excess[probe], 0.0)
        return probe
