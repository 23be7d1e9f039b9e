"""Measuring what the parts of a round cost on this machine, and where the result is kept."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ddtree
from ddtree.accept import accept_path
from ddtree.budget import Measurement, StepCost
from ddtree.engine.default_target import cache_dir
from ddtree.tree import DraftTree, build_tree

if TYPE_CHECKING:
    from ddtree.drafter import Drafter

VERIFY_SIZES = (1, 2, 5, 9, 17, 33, 65, 129)
DRAFT_BATCHES = (1, 2, 4, 8)
CONTEXTS = (128, 512)


def machine_costs(
    target: str, drafter: str, device: torch.device | str, dtype: torch.dtype
) -> StepCost:
    """The stored calibration for these, or an assumed shape where there is none.

    Raises:
        BudgetError: the stored file is damaged.
    """
    key = calibration_key(target, drafter, device, dtype)
    path = calibration_path(key)
    return StepCost.load(path, key) if path.is_file() else StepCost.assumed()


def calibration_key(
    target: str, drafter: str, device: torch.device | str, dtype: torch.dtype
) -> dict[str, str]:
    """What a calibration depends on; folders by their resolved path."""
    device = torch.device(device)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "target": _name(target),
        "drafter": _name(drafter),
        "device": f"{device.type} {kind or platform.machine()}, {torch.get_num_threads()} threads",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "sglang-ddtree": ddtree.__version__,
    }


def calibration_path(key: dict[str, str]) -> Path:
    """Where the calibration for a key lives in the cache."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "calibration" / f"{digest[:16]}.json"


def _name(model: str) -> str:
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model


def measure(target_model: Any, drafter: Drafter, repetitions: int) -> Iterator[Measurement]:
    """Time every stage in the reference engine, sizes interleaved so that drift hits all alike.

    The first repetition warms up and is not reported.

    Args:
        target_model: transformers causal model.
        repetitions: measurements of each size, at least 1.
    """
    benches = [_Bench(target_model, drafter, context) for context in CONTEXTS]
    for repetition in range(repetitions + 1):
        for bench in benches:
            measured = list(bench.measure())
            if repetition:
                yield from measured


class _Bench:
    """One request with a committed context, whose rounds are timed and never committed."""

    def __init__(self, target_model: Any, drafter: Drafter, context: int) -> None:
        from ddtree.engine.target import Target

        device = next(target_model.parameters()).device
        config = target_model.config.get_text_config()
        generator = torch.Generator().manual_seed(context)
        prompt = torch.randint(config.vocab_size, (1, context), generator=generator).to(device)
        self._target = Target(
            target_model, context + max(VERIFY_SIZES), tuple(drafter.target_layer_ids)
        )
        self._drafter, self._context, self._device = drafter, context, device
        self._roots = prompt[:, -1].expand(max(DRAFT_BATCHES))
        with torch.inference_mode():
            features = self._target.prefill(prompt).features
            assert features is not None, "the target was not asked for features"
            self._draft_caches = {b: self._committed(features, b) for b in DRAFT_BATCHES}

    def _committed(self, features: torch.Tensor, batch: int) -> Any:
        cache = self._drafter.new_cache(batch, self._context)
        positions = torch.arange(self._context, device=self._device).expand(batch, -1)
        self._drafter.extend_context(cache, features.expand(batch, -1, -1), positions)
        return cache

    @torch.inference_mode()
    def measure(self) -> Iterator[Measurement]:
        """Every size of every stage once."""
        for batch in DRAFT_BATCHES:
            seconds, logits = self._timed(self._draft, batch)
            yield Measurement("draft", batch * self._drafter.block_size, self._context, seconds)
        for size in VERIFY_SIZES:
            built, tree = self._timed(build_tree, logits[:1], self._roots[:1], size - 1)
            seconds, out = self._timed(self._target.verify, tree)
            yield Measurement("verify", size, self._context, seconds)
            accepted, _ = self._timed(_accept, tree, out.logits)
            yield Measurement("rest", size, self._context, built + accepted)

    def _draft(self, batch: int) -> torch.Tensor:
        positions = torch.full((batch,), self._context, device=self._device)
        cache = self._draft_caches[batch]
        return self._drafter.draft_logits(cache, self._roots[:batch], positions)

    def _timed(self, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        result = work(*arguments)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start, result


def _accept(tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
    return accept_path(tree, logits.argmax(-1)).path
