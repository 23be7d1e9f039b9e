"""One generation as it happens, and the record it leaves."""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ddtree
from ddtree.cli.errors import CommandError
from ddtree.cli.pair import Pair


@dataclass(frozen=True)
class Settings:
    """What a request asks for; the engine's `check_request` explains and checks each."""

    mode: str
    max_new_tokens: int
    budget: int | None = None
    chain_seed: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


class Run:
    """A generation from one prompt.

    Attributes:
        tokens: new tokens so far.
        accept_lengths: tokens committed by each round so far.
        seconds: time spent decoding, prefill included; what the caller does between rounds,
            such as drawing, is not counted.
    """

    def __init__(self, pair: Pair, input_ids: list[int], settings: Settings) -> None:
        from ddtree.engine import check_request
        from ddtree.metrics import StageClock

        if settings.temperature > 0 and settings.seed is None:
            # Chosen here, so that the record can repeat the run.
            settings = Settings(**{**asdict(settings), "seed": secrets.randbits(31)})
        self.pair, self.settings = pair, settings
        self._request = check_request(
            pair.target, pair.drafter, input_ids, eos_token_ids=pair.eos, **asdict(settings)
        )
        self._clock = StageClock(self._request.input_ids.device)
        self.tokens: list[int] = []
        self.accept_lengths: list[int] = []
        self.seconds = 0.0

    def rounds(self) -> Iterator[Any]:
        """The engine's rounds; the first is the prefill, which has no tree."""
        from ddtree.engine import decode

        steps = decode(self.pair.target, self.pair.drafter, self._request, self._clock)
        while True:
            start = time.perf_counter()
            step = next(steps, None)
            self.seconds += time.perf_counter() - start
            if step is None:
                return
            self.tokens += step.tokens
            if step.tree is not None:
                self.accept_lengths.append(len(step.tokens))
            yield step

    @property
    def tau(self) -> float:
        from ddtree.metrics import tau

        return tau(self.accept_lengths)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def finish_reason(self) -> str:
        return "stop" if self.tokens and self.tokens[-1] in self.pair.eos else "length"

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage, prefill first."""
        return self._clock.seconds()

    def summary(self) -> str:
        """The run in one line."""
        parts = [f"{len(self.tokens)} tokens", f"{self.seconds:.2f} s",
                 f"{self.tokens_per_second:.1f} tokens/s", f"tau {self.tau:.2f}",
                 f"{len(self.accept_lengths)} rounds"]  # fmt: skip
        if self.settings.temperature > 0:
            parts.append(f"seed {self.settings.seed}")
        return ", ".join(parts)

    def record(self, text: str) -> dict[str, Any]:
        """Everything measured, for a machine."""
        from ddtree.metrics import accept_histogram, depth_acceptance

        return {
            "settings": asdict(self.settings) | {"budget": self._request.budget},
            "prompt_ids": self._request.input_ids[0].tolist(),
            "tokens": self.tokens,
            "text": text,
            "finish_reason": self.finish_reason,
            "rounds": len(self.accept_lengths),
            "tau": self.tau,
            "accept_lengths": self.accept_lengths,
            "accept_histogram": accept_histogram(self.accept_lengths),
            "depth_acceptance": depth_acceptance(self.accept_lengths),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "stage_seconds": self.stage_seconds(),
        }


def header(pair: Pair, command: str) -> dict[str, Any]:
    """What every record starts with: the command, the versions and the models."""
    import torch
    import transformers

    weight = next(pair.target.parameters())
    return {
        "command": command,
        "versions": {
            "sglang-ddtree": ddtree.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "threads": torch.get_num_threads(),
    }


def check_output(*files: Path | None) -> None:
    """Refuse an output file that cannot be written, before the work is done.

    Raises:
        CommandError: its folder does not exist, or it is a folder itself.
    """
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            reason = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
            raise CommandError(f"{file} cannot be written: {reason}")


def write_text(file: Path, text: str) -> None:
    """Write an output file.

    Raises:
        CommandError: the system refuses.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from None


def write_json(file: Path | None, record: dict[str, Any]) -> None:
    """Write a record as one line, if a file is named."""
    if file is not None:
        write_text(file, json.dumps(record, ensure_ascii=False) + "\n")
