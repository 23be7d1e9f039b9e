"""Documents with the target's hidden states, on disk.

A store is a folder of safetensors shards. Each shard packs whole documents back to back, so that
a training epoch reads features instead of running the target again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "index.json"


class StoreError(ValueError):
    """A feature store cannot be read or does not fit what is asked of it."""


@dataclass(frozen=True)
class Document:
    """One prompt with its response and the target's features.

    Attributes:
        tokens: int64 [T], prompt followed by response.
        prompt_length: tokens of the prompt; the response starts there.
        features: [F, K * H] concatenated hidden states of the chosen layers, F <= T. The last
            one or two tokens may have none: nothing is ever drafted from them.
        source: where the prompt came from, for balance and reports.
    """

    tokens: torch.Tensor
    prompt_length: int
    features: torch.Tensor
    source: str

    def cut(self, length: int) -> Document:
        """The same document with at most `length` tokens."""
        kept = self.tokens[:length], self.prompt_length, self.features[:length]
        return Document(*kept, self.source)


class StoreWriter:
    """Appends documents to a store; a shard becomes visible only when it is complete."""

    def __init__(
        self, folder: str | Path, *, layer_ids: Sequence[int], hidden_size: int, shard_tokens=65536
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shard_tokens = shard_tokens
        self._pending: list[Document] = []
        self._write_index(list(layer_ids), hidden_size)

    def _write_index(self, layer_ids: list[int], hidden_size: int) -> None:
        path = self.folder / INDEX
        index = {"layer_ids": layer_ids, "hidden_size": hidden_size}
        if path.exists() and json.loads(path.read_text()) != index:
            raise StoreError(
                f"{path} was written for other layers than {layer_ids}; use a new folder"
            )
        path.write_text(json.dumps(index))

    def add(self, document: Document) -> None:
        self._pending.append(document)
        if sum(len(d.tokens) for d in self._pending) >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        docs, self._pending = self._pending, []
        lengths = [[len(d.tokens), len(d.features), d.prompt_length] for d in docs]
        tensors = {
            "tokens": torch.cat([d.tokens for d in docs]).to(torch.int32),
            "features": torch.cat([d.features for d in docs]).to(torch.bfloat16),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
        }
        number = len(list(self.folder.glob("shard-*.safetensors")))
        final = self.folder / f"shard-{number:05d}.safetensors"
        partial = final.with_suffix(".partial")
        save_file(tensors, partial, metadata={"sources": json.dumps([d.source for d in docs])})
        os.replace(partial, final)


@dataclass(frozen=True)
class _Entry:
    shard: Path
    token_start: int
    token_count: int
    feature_start: int
    feature_count: int
    prompt_length: int
    source: str


class FeatureStore:
    """Random access to the documents of one or more store folders.

    Args:
        folders: store folders with the same layers.
        layer_ids: layers to read, in this order; all stored ones when None.
    Raises:
        StoreError: no documents, or a layer that was not stored.
    """

    def __init__(self, folders: Sequence[str | Path], layer_ids: Sequence[int] | None = None):
        self.folders = [Path(f) for f in folders]
        indices = [self._read_index(f) for f in self.folders]
        if any(i != indices[0] for i in indices):
            raise StoreError("the feature folders hold different layers; prepare them alike")
        stored, self.hidden_size = indices[0]["layer_ids"], indices[0]["hidden_size"]
        self.layer_ids = list(layer_ids) if layer_ids is not None else stored
        missing = [i for i in self.layer_ids if i not in stored]
        if missing:
            raise StoreError(f"layers {missing} are not among the stored {stored}; prepare again")
        self._columns = None
        if self.layer_ids != stored:
            self._columns = [stored.index(i) for i in self.layer_ids]
        self._open: dict[Path, Any] = {}
        self.entries = [e for f in self.folders for e in self._scan(f)]
        if not self.entries:
            raise StoreError(
                f"no documents in {[str(f) for f in self.folders]}; prepare some first"
            )

    @staticmethod
    def _read_index(folder: Path) -> dict:
        path = folder / INDEX
        if not path.is_file():
            raise StoreError(f"{folder} is not a feature store: {INDEX} is missing")
        return json.loads(path.read_text())

    @staticmethod
    def _scan(folder: Path) -> Iterator[_Entry]:
        for shard in sorted(folder.glob("shard-*.safetensors")):
            with safe_open(shard, "pt") as handle:
                lengths = handle.get_tensor("lengths").tolist()
                sources = json.loads(handle.metadata()["sources"])
            token = feature = 0
            for (tokens, features, prompt), source in zip(lengths, sources, strict=True):
                yield _Entry(shard, token, tokens, feature, features, prompt, source)
                token, feature = token + tokens, feature + features

    def __len__(self) -> int:
        return len(self.entries)

    def prompt(self, index: int) -> torch.Tensor:
        """int64 [P] prompt tokens of a document, without reading its features."""
        entry = self.entries[index]
        return self._read(entry, "tokens", entry.token_start, entry.prompt_length).long()

    def response(self, index: int) -> torch.Tensor:
        """int64 [T - P] response tokens of a document, without reading its features."""
        entry = self.entries[index]
        start = entry.token_start + entry.prompt_length
        return self._read(entry, "tokens", start, entry.token_count - entry.prompt_length).long()

    def _read(self, entry: _Entry, name: str, start: int, count: int) -> torch.Tensor:
        if entry.shard not in self._open:
            self._open[entry.shard] = safe_open(entry.shard, "pt")
        return self._open[entry.shard].get_slice(name)[start : start + count]

    def __getitem__(self, index: int) -> Document:
        entry = self.entries[index]
        tokens = self._read(entry, "tokens", entry.token_start, entry.token_count).long()
        features = self._read(entry, "features", entry.feature_start, entry.feature_count)
        if self._columns is not None:
            split = features.view(len(features), -1, self.hidden_size)
            features = split[:, self._columns].flatten(1)
        return Document(tokens, entry.prompt_length, features, entry.source)
