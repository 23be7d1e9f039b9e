"""Documents for training: from a feature store, or from the target as they are needed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.train.store import Document, FeatureStore


class SourceError(ValueError):
    """Training data cannot be read."""


class DocumentSource(Protocol):
    """Documents by index, and their token ids without the cost of features."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def prompt(self, index: int) -> Tensor: ...

    def response(self, index: int) -> Tensor: ...


class OnlineSource:
    """Responses on disk, features from the frozen target when a document is asked for.

    Args:
        files: JSONL with `prompt_ids`, `response_ids` and optionally `source`.
        target: transformers causal model.
        layer_ids: target layers to read.
        max_tokens: cut longer documents before the target sees them; 0 for no limit.
    """

    def __init__(
        self, files: Sequence[str | Path], target: Any, layer_ids: Sequence[int], max_tokens=0
    ) -> None:
        self._target, self._layer_ids, self._max_tokens = target, layer_ids, max_tokens
        self.records = [r for file in files for r in read_responses(Path(file))]
        if not self.records:
            raise SourceError(f"no responses in {[str(f) for f in files]}")

    def __len__(self) -> int:
        return len(self.records)

    def prompt(self, index: int) -> Tensor:
        """int64 [P]."""
        return torch.tensor(self.records[index]["prompt_ids"])

    def response(self, index: int) -> Tensor:
        """int64 [T - P]."""
        return torch.tensor(self.records[index]["response_ids"])

    @torch.no_grad()
    def __getitem__(self, index: int) -> Document:
        record = self.records[index]
        tokens = torch.tensor(record["prompt_ids"] + record["response_ids"])
        if self._max_tokens:
            tokens = tokens[: self._max_tokens]
        features = target_features(self._target, tokens[None, :-1], self._layer_ids)[0]
        return Document(
            tokens, len(record["prompt_ids"]), features, record.get("source", "unnamed")
        )


def target_features(target: Any, tokens: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """Features [B, T, K * H] of int64 [B, T] tokens without padding."""
    embedding = target.get_input_embeddings().weight
    decoder = target.get_decoder()
    out = decoder(tokens.to(embedding.device), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1)


def open_source(
    paths: Sequence[str | Path], target: Any, layer_ids: Sequence[int], max_tokens: int
) -> DocumentSource:
    """A source for feature stores (folders) or response files (JSONL), not both at once."""
    folders = [Path(p).is_dir() for p in paths]
    if all(folders):
        return FeatureStore(paths, layer_ids)
    if any(folders):
        raise SourceError("data mixes feature stores and JSONL files; prepare the files first")
    return OnlineSource(paths, target, layer_ids, max_tokens)


def split_validation(source: DocumentSource, fraction: float) -> tuple[list[int], list[int]]:
    """Indices for training and for validation.

    A document's side depends on its prompt alone, so that it never changes as data grows and
    two answers to one prompt stay together.
    """
    training: list[int] = []
    validation: list[int] = []
    for index in range(len(source)):
        prompt = source.prompt(index).to(torch.int32).numpy().tobytes()
        held_out = zlib.crc32(prompt) % 10_000 < fraction * 10_000
        (validation if held_out else training).append(index)
    return training, validation


def read_responses(path: str | Path) -> list[dict]:
    """Records with `prompt_ids` and `response_ids` of a JSONL file.

    Raises:
        SourceError: the file cannot be read, or a record lacks one of them.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"the responses {path} cannot be read ({error})") from None
    records = [json.loads(line) for line in lines if line.strip()]
    for number, record in enumerate(records, 1):
        if not record.get("prompt_ids") or not record.get("response_ids"):
            raise SourceError(
                f"{path}, line {number}: prompt_ids and response_ids are needed; "
                "run `ddtree train prepare` on the prompts first"
            )
    return records
