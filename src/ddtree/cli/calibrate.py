"""`ddtree calibrate`: measure, store for the server, show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree.cli.pair import Pair


def run_calibration(out: Console, err: Console, pair: Pair, repetitions: int) -> dict[str, Any]:
    """Measure the pair's stages, store them in the cache and return the record."""
    from ddtree.budget import StepCost
    from ddtree.engine.calibrate import (
        CONTEXTS,
        DRAFT_BATCHES,
        VERIFY_SIZES,
        calibration_key,
        calibration_path,
        measure,
    )

    weight = next(pair.target.parameters())
    key = calibration_key(pair.target_name, str(pair.drafter_name), weight.device, weight.dtype)
    total = repetitions * len(CONTEXTS) * (2 * len(VERIFY_SIZES) + len(DRAFT_BATCHES))
    steps = measure(pair.target, pair.drafter, repetitions)
    measurements = list(track(steps, "measuring", total=total, console=err))
    costs = StepCost.fit(measurements, key)
    path = calibration_path(key)
    costs.save(path)
    out.print(_table(costs))
    out.print(f"stored in {path}", soft_wrap=True, highlight=False)
    return {"costs": asdict(costs), "repetitions": repetitions}


def _table(costs: Any) -> Table:
    table = Table(
        "stage", "tokens", "ms", "spread", title="cost by tokens (median, half interquartile range)"
    )
    for stage in ("verify", "draft", "rest"):
        curve = getattr(costs, stage)
        for size, seconds, spread in zip(curve.sizes, curve.seconds, curve.spread, strict=True):
            table.add_row(stage, str(size), f"{seconds * 1e3:.2f}", f"{spread * 1e3:.2f}")
    return table
