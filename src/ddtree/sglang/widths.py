"""The width of each round in the server: what the worker tells `ddtree.budget` and asks of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.budget import (
    TREE,
    Arm,
    Controller,
    Evidence,
    EvidenceReader,
    Served,
    StepCost,
    arms_up_to,
)
from ddtree.tree import DraftTree

logger = logging.getLogger(__name__)


@dataclass
class _InFlight:
    """A round whose results the scheduler has not waited for yet."""

    arm: Arm
    batch: int
    context: int
    seconds: float | None = None
    evidence: torch.Tensor | None = None  # on the host, once the round's results are


class WidthChooser:
    """Feeds a `Controller` with served rounds, without a synchronisation of its own.

    A round's time runs from the end of the round before to its own end. On a CPU a round has ended
    when the worker returns; elsewhere the scheduler sees it end when it waits for its results,
    which is also when what was accepted can be read.

    Args:
        prior: the machine's price list.
        metrics: whether the server exports metrics; rounds are then counted by arm.
    """

    def __init__(
        self,
        width: int,
        block_size: int,
        prior: StepCost,
        device: torch.device | str,
        *,
        metrics: bool,
    ) -> None:
        arms = arms_up_to(width, block_size)
        widths = [arm.width for arm in arms if arm.kind == TREE]
        self._controller = Controller(arms, block_size, prior)
        self._reader = EvidenceReader(widths, block_size - 1, device)
        self._on_cpu = torch.device(device).type == "cpu"
        self._last_end: float | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._exported = _exported_counter() if metrics else None

    def choose(self, batch: int, context: int) -> Arm:
        """The next round's arm; `context` is the batch's committed tokens, as the host knows."""
        arm = self._controller.choose(batch, context)
        self._in_flight.append(_InFlight(arm, batch, context))
        if self._exported is not None:
            self._exported.labels(arm=str(arm)).inc()
        return arm

    def interrupt(self) -> None:
        """A prefill ran: the next round's time does not start with the round before."""
        self._last_end = time.perf_counter() if self._on_cpu else None

    def launched(self, tree: DraftTree, path: torch.Tensor) -> None:
        """The chosen round was handed to the device; `tree` as built, `path` int64 [B, places]."""
        one = self._in_flight[-1]
        if one.arm.drafts:
            one.evidence = self._reader.read(tree, path)
            if not self._on_cpu:
                host = torch.empty_like(one.evidence, device="cpu", pin_memory=True)
                one.evidence = host.copy_(one.evidence, non_blocking=True)
        if self._on_cpu:
            one.seconds = self._lap()

    def finished(self, batch: int) -> None:
        """The scheduler has the results of the oldest round in flight, of `batch` requests."""
        while self._in_flight:
            one = self._in_flight.popleft()
            if one.batch == batch:
                break
        else:
            return
        seconds = one.seconds if self._on_cpu else self._lap()
        evidence = None if one.evidence is None else Evidence(*one.evidence.unbind(0))
        self._controller.observe(Served(one.arm, one.batch, one.context, seconds, evidence))

    def _lap(self) -> float | None:
        now, before = time.perf_counter(), self._last_end
        self._last_end = now
        return None if before is None else now - before


def _exported_counter() -> Any:
    """`ddtree_rounds_total{arm}` in the server's metrics; SGLang depends on the client."""
    from prometheus_client import Counter

    return Counter("ddtree_rounds", "Decode rounds by how they were run.", ["arm"])
