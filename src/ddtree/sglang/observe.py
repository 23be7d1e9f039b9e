"""Stage times and trees in the server's log, behind `DDTREE_LOG_ROUNDS`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ddtree.metrics import StageClock, debug_summary
from ddtree.tree import DraftTree

logger = logging.getLogger(__name__)


class RoundLog:
    """Counts rounds and logs the mean time of each stage every `period` of them; 0 is off."""

    def __init__(self, period: int, device: torch.device | str) -> None:
        self._period = period
        self._device = device
        self._rounds = 0
        self._clock = StageClock(device)
        self.stage: Callable[[str], AbstractContextManager[None]]
        self.stage = self._timed if period else lambda name: nullcontext()

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return self._clock.stage(name)

    def finish(self, tree: DraftTree) -> None:
        """Call at the end of a round with its trees."""
        if not self._period:
            return
        self._rounds += 1
        if self._rounds % self._period:
            return
        seconds = self._clock.seconds()
        times = ", ".join(
            f"{name} {total / self._period * 1e3:.2f} ms"
            for name, total in seconds.items()
            if total
        )
        logger.info(
            "DDTREE rounds %d to %d, batch %d: %s; tree: %s; tokens %s, parents %s",
            self._rounds - self._period + 1,
            self._rounds,
            len(tree.tokens),
            times,
            debug_summary(tree),
            tree.tokens[0].tolist(),
            tree.parents[0].tolist(),
        )
        self._clock = StageClock(self._device)
