"""Estimated tau: what a drafter would commit per round, from known greedy continuations.

Verification under greedy decoding is a comparison with the target's own continuation. Where that
is known (a prepared document), chain and tree acceptance follow without running the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.drafter import DFlashDraftModel
from ddtree.train.batch import IGNORE, Batch, pack, valid_anchors
from ddtree.train.store import Document
from ddtree.tree import DraftTree, build_tree

CHAIN = "chain"


@dataclass(frozen=True)
class DocumentTau:
    """Rounds of one document.

    Attributes:
        source: the document's source.
        committed: tokens after the first root.
        rounds: by method (`chain`, or the tree's budget as text) rounds needed for them.
    """

    source: str
    committed: int
    rounds: dict[str, int]


@torch.inference_mode()
def estimate_tau(
    model: DFlashDraftModel,
    embedding: nn.Module,
    head: Tensor,
    documents: Iterable[Document],
    budgets: Sequence[int] = (16, 32, 64),
) -> list[DocumentTau]:
    """Walk each document's response as the engine would; full softmax.

    Args:
        embedding, head: the target's; head is [V, H].
        budgets: tree sizes to estimate besides the chain.
    """
    results = []
    for document in documents:
        anchors = valid_anchors(document)
        if not len(anchors):
            continue
        batch = pack([document], [anchors], model.config.block_size)
        batch = batch.to(head.device, model.fc.weight.dtype)
        accepted = accepted_lengths(model, embedding, head, batch, budgets)
        rounds = {name: rounds_needed(lengths.tolist()) for name, lengths in accepted.items()}
        results.append(DocumentTau(document.source, len(anchors), rounds))
    return results


def accepted_lengths(
    model: DFlashDraftModel,
    embedding: nn.Module,
    head: Tensor,
    batch: Batch,
    budgets: Sequence[int],
) -> dict[str, Tensor]:
    """Drafted tokens accepted at every anchor, int64 [A], by method."""
    parts: dict[str, list[Tensor]] = {CHAIN: [], **{str(b): [] for b in budgets}}
    for logits, labels, roots in draft_anchors(model, embedding, head, batch):
        matches = (logits.argmax(-1) == labels).long()
        parts[CHAIN].append(matches.cumprod(1).sum(1))
        for budget, length in _tree_lengths(logits, roots, labels, budgets).items():
            parts[str(budget)].append(length)
    return {name: torch.cat(lengths) for name, lengths in parts.items()}


def draft_anchors(
    model: DFlashDraftModel, embedding: nn.Module, head: Tensor, batch: Batch
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Draft from every anchor, some at a time: float32 logits [a, b - 1, V], labels, roots."""
    hidden = model(batch.context, block_embeddings(model, embedding, batch.roots))[:, 1:]
    rows = max(1, (1 << 24) // (head.shape[0] * hidden.shape[1]))
    for states, labels, roots in zip(
        hidden.split(rows), batch.labels.split(rows), batch.roots.split(rows), strict=True
    ):
        yield F.linear(states, head).float(), labels, roots


def block_embeddings(model: DFlashDraftModel, embedding: nn.Module, roots: Tensor) -> Tensor:
    """Embeddings [A, b, H] of ``[root, MASK, ..., MASK]``."""
    config = model.config
    tokens = roots.new_full((len(roots), config.block_size), config.mask_token_id)
    tokens[:, 0] = roots
    return embedding(tokens).to(model.fc.weight.dtype)


def _tree_lengths(
    logits: Tensor, roots: Tensor, labels: Tensor, budgets: Sequence[int]
) -> dict[int, Tensor]:
    """Depth of the deepest node on the known continuation, by budget."""
    if not budgets:
        return {}
    depths = accepted_depths(build_tree(logits, roots, max(budgets)), labels)
    # Nodes come in order of score: the first n of them are the tree of budget n.
    return {n: depths[:, : n + 1].amax(1) for n in budgets}


def accepted_depths(tree: DraftTree, labels: Tensor) -> Tensor:
    """Depth of every node on the known continuation (`labels` int64 [A, b - 1]), 0 elsewhere."""
    # Column d holds the token wanted at depth d; the root is given.
    wanted = F.pad(labels, (1, 0), value=IGNORE).gather(1, tree.depths)
    on_path = tree.valid & (tree.tokens == wanted)
    on_path[:, 0] = True
    for _ in range(labels.shape[1] - 1):
        on_path &= on_path.gather(1, tree.parents.clamp(min=0))
    return tree.depths * on_path


def rounds_needed(accepted: Sequence[int]) -> int:
    """Rounds for a document, from the drafted tokens accepted at each of its anchors."""
    rounds = position = 0
    while position < len(accepted):
        position += accepted[position] + 1
        rounds += 1
    return rounds
