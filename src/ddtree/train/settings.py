"""One TOML file describes a training run."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A training configuration cannot be used."""


@dataclass(frozen=True)
class TrainSettings:
    """A training run; every field is a key of the TOML file.

    Attributes:
        target: folder or hub id of the frozen target.
        data: feature stores (`ddtree train prepare`), or JSONL files with `prompt_ids` and
            `response_ids` whose features the target computes online.
        out: folder for checkpoints, logs and the exported drafter.
        target_layer_ids: layers whose outputs the drafter reads; z-lab's spread when empty.
        mask_token_id: token that stands for a slot to predict; must be one the target's
            tokenizer never writes.
        copy_layers: target layers to start the drafter's layers from, one each; random start
            when empty.
        fit_start: fit the context projection and the attention's start to the features.
        start_from: folder of a drafter of the same shape to start from; its block size may differ.
        documents: documents per step and process; anchors: blocks per document.
        max_tokens: longer documents are cut to so many tokens; 0 for no limit.
        validation: fraction of the documents kept for estimating tau.
        decay: exp(-(k - 1) / decay) weighs depth k; dpace_alpha replaces it when set.
        common_tokens, sampled_tokens: most frequent and random vocabulary rows in the training
            softmax, besides the labels; full softmax when both are 0.
        optimiser: "adamw", or "muon" for the layers' matrices with AdamW for the rest.
        stop_step: end the run early, as if it were killed politely; 0 for never.
    """

    target: str
    data: tuple[str, ...]
    out: str
    num_layers: int = 3
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = 16
    copy_layers: tuple[int, ...] = ()
    fit_start: bool = True
    start_from: str = ""
    documents: int = 6
    anchors: int = 40
    max_tokens: int = 0
    validation: float = 0.03
    decay: float = 4.0
    dpace_alpha: float | None = None
    common_tokens: int = 2048
    sampled_tokens: int = 1024
    optimiser: str = "adamw"
    steps: int = 1000
    stop_step: int = 0
    lr: float = 1e-3
    warmup: float = 0.04
    final_lr: float = 0.0
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    accumulate: int = 1
    mixed_precision: str = "no"
    threads: int = 0
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    evaluate_documents: int = 24
    budgets: tuple[int, ...] = (16, 32, 64)
    save_every: int = 100

    def __post_init__(self) -> None:
        positive = ("documents", "anchors", "steps", "accumulate", "log_every", "save_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.optimiser not in ("adamw", "muon"):
            raise SettingsError(f"optimiser is {self.optimiser}; it must be adamw or muon")
        if not 0 <= self.validation < 1:
            raise SettingsError(f"validation is {self.validation}; it is a fraction below 1")
        if self.copy_layers and len(self.copy_layers) != self.num_layers:
            raise SettingsError(
                f"copy_layers names {len(self.copy_layers)} layers for {self.num_layers} of the "
                "drafter; name one each or none"
            )

    @classmethod
    def read(cls, path: str | Path, **overrides: Any) -> TrainSettings:
        """Read a TOML file; `overrides` win over it."""
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"the configuration {path} cannot be read ({error})") from None
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path} is not valid TOML: {error}") from None
        return cls.from_dict({**raw, **overrides})

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TrainSettings:
        """Build from plain values; lists become tuples."""
        fields = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - fields)
        if unknown:
            raise SettingsError(f"unknown settings {unknown}; known are {sorted(fields)}")
        missing = sorted({"target", "data", "out"} - set(raw))
        if missing:
            raise SettingsError(f"the configuration lacks {missing}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for logs and checkpoints."""
        return dataclasses.asdict(self)
