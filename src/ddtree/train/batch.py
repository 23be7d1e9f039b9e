"""From documents to training batches: anchors, labels and packing.

Nothing here can poison a run, by construction: documents are packed without padding, an anchor
is chosen only where it has a label and all of its context, a block's attention is computed from
its own document alone (`ddtree.drafter.model`), and labels beyond a document's end are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree.drafter import PackedContext
from ddtree.train.store import Document

IGNORE = -100


class BatchError(ValueError):
    """No batch can be made of the given documents."""


@dataclass(frozen=True)
class Batch:
    """Blocks of several documents.

    Attributes:
        context: packed features and the anchors' positions.
        roots: int64 [A] token at each anchor.
        labels: int64 [A, b - 1] tokens after the root; `IGNORE` beyond the document's end.
    """

    context: PackedContext
    roots: Tensor
    labels: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        """Move to a device; features are cast to `dtype` there."""
        moved = self._map(lambda t: t.to(device, non_blocking=True))
        return replace(
            moved, context=replace(moved.context, features=moved.context.features.to(dtype))
        )

    def pin(self) -> Batch:
        """Copy to page-locked memory, from which a GPU reads while the host goes on."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        theirs = self.context
        context = replace(theirs, features=change(theirs.features), anchors=change(theirs.anchors))
        return Batch(context, change(self.roots), change(self.labels))


def valid_anchors(document: Document) -> Tensor:
    """int64 positions of response tokens a block may start from.

    An anchor needs one label after it, one context token before it, and features for all of
    its context.
    """
    first = max(document.prompt_length, 1)
    last = min(len(document.tokens) - 2, len(document.features))
    return torch.arange(first, max(first, last + 1))


def choose_anchors(document: Document, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` different valid anchors in ascending order, drawn uniformly."""
    valid = valid_anchors(document)
    chosen = torch.randperm(len(valid), generator=generator)[:count]
    return valid[chosen.sort().values]


def pack(documents: Sequence[Document], anchors: Sequence[Tensor], block_size: int) -> Batch:
    """Pack documents with their anchors; documents without an anchor are left out.

    Args:
        anchors: per document int64 positions from `valid_anchors`.
    Raises:
        BatchError: no document has an anchor.
    """
    pairs = [(d, a) for d, a in zip(documents, anchors, strict=True) if len(a)]
    if not pairs:
        raise BatchError("none of the documents has a valid anchor; give longer responses")
    # No block reads beyond its anchor, so the tail of the features is never touched.
    lengths = [int(a.max()) for _, a in pairs]
    features = torch.cat([d.features[:n] for (d, _), n in zip(pairs, lengths, strict=True)])
    context = PackedContext(
        features, lengths, torch.cat([a for _, a in pairs]), [len(a) for _, a in pairs]
    )
    roots = torch.cat([d.tokens[a] for d, a in pairs])
    labels = torch.cat([_labels(d.tokens, a, block_size) for d, a in pairs])
    return Batch(context, roots, labels)


def _labels(tokens: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    positions = anchors[:, None] + torch.arange(1, block_size)
    inside = positions < len(tokens)
    return torch.where(inside, tokens[positions.clamp(max=len(tokens) - 1)], IGNORE)
