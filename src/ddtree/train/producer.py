"""Batches made ahead of the trainer, in a thread with a bounded queue.

Everything about a batch follows from the seed and the step, never from what ran before: a resumed
run sees exactly the batches the killed one would have seen.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ddtree.train.batch import Batch, choose_anchors, pack
from ddtree.train.sources import DocumentSource


@dataclass(frozen=True)
class BatchPlan:
    """Which documents and anchors make up micro-batch `index` of rank `rank`.

    Attributes:
        source: documents; indices: the ones to train on.
        documents, anchors: documents per micro-batch and blocks per document.
        ranks: processes; each takes every `ranks`-th micro-batch.
    """

    source: DocumentSource
    indices: Sequence[int]
    documents: int
    anchors: int
    block_size: int
    seed: int
    rank: int = 0
    ranks: int = 1
    max_tokens: int = 0

    def batch(self, index: int) -> Batch:
        """Micro-batch `index`; documents come in a new random order every epoch."""
        first = (index * self.ranks + self.rank) * self.documents
        chosen = [self._document(first + i) for i in range(self.documents)]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + first)
        documents = [self._cut(self.source[i]) for i in chosen]
        anchors = [choose_anchors(d, self.anchors, generator) for d in documents]
        return pack(documents, anchors, self.block_size)

    def epoch(self, index: int) -> float:
        """Passes over the documents before micro-batch `index`."""
        return index * self.ranks * self.documents / len(self.indices)

    def _document(self, visit: int) -> int:
        epoch, place = divmod(visit, len(self.indices))
        generator = torch.Generator().manual_seed(self.seed * 7919 + epoch)
        return self.indices[int(torch.randperm(len(self.indices), generator=generator)[place])]

    def _cut(self, document):
        if not self.max_tokens or len(document.tokens) <= self.max_tokens:
            return document
        return document.cut(self.max_tokens)


class Producer:
    """Runs `make(index)` ahead in a thread; at most `depth` results wait.

    Attributes:
        waited: seconds the consumer has spent waiting so far.
    """

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, depth: int = 4):
        self.waited = 0.0
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._range = range(first, last)
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], Batch]) -> None:
        try:
            for index in self._range:
                if not self._put(make(index)):
                    return
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Batch]:
        for _ in self._range:
            began = time.perf_counter()
            item = self._queue.get()
            self.waited += time.perf_counter() - began
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop the thread; what it has made is dropped."""
        self._stop.set()
        self._thread.join()
