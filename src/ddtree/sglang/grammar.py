"""Requests with a grammar: trees of what it allows, and the tokens it allows at each node.

SGLang's own tree algorithms draft first and then mask, so that a tree may be full of nodes that can
never be accepted. Here each such request's tree is searched on the host with its matcher at hand.
That takes the host's time before the verify instead of beside it, and nothing of batches without
grammars.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.managers.schedule_batch import Req

from ddtree.conditional import ConditionalHead, DominoHead, SelectorHead
from ddtree.constrained import Candidates, build_constrained_tree
from ddtree.sglang.shard import VocabularyShard
from ddtree.tree import DraftTree

# Tokens per depth that a plain drafter offers. A grammar may well forbid the best hundred.
OFFERED = 1024


def draft_candidates(
    scores: torch.Tensor | ConditionalHead | None, rows: list[int], vocabulary: VocabularyShard
) -> list[Candidates]:
    """What the drafter offers to the requests in `rows` of a batch, copied to the host.

    Args:
        scores: draft logits [B, L, V'], a head's conditional scores, or None where nothing was
            drafted. Of Domino the logits before its correction: a recurrent state per prefix is
            more than a search on the host can carry.
    """
    if isinstance(scores, DominoHead):
        scores = scores.logits
    if scores is None:
        offered = torch.empty(len(rows), 0, 1, 1), torch.empty(len(rows), 0, 1, dtype=torch.int64)
    elif isinstance(scores, torch.Tensor):
        top = vocabulary.top_tokens(scores[rows], OFFERED)
        offered = top.costs[:, :, None], top.tokens
    else:
        assert isinstance(scores, SelectorHead)
        offered = scores.costs[rows], scores.tokens[rows]
    costs, tokens = (field.cpu() for field in offered)
    return [Candidates(*pair) for pair in zip(costs, tokens, strict=True)]


class NodeMasks:
    """The tokens allowed at every node of a batch's trees, filled as the trees are searched.

    Args:
        reqs: of the batch; at least one has a grammar.
        width: nodes of each tree.
        vocab: the model's vocabulary.
    """

    def __init__(self, reqs: list[Req], width: int, vocab: int) -> None:
        self._reqs, self._width = reqs, width
        self._handle: Any = next(req.grammar for req in reqs if req.grammar is not None)
        self._bits = self._handle.allocate_vocab_mask(vocab, len(reqs) * width, "cpu")

    def allowed(self, row: int, path: list[int], node: int) -> torch.Tensor | None:
        """Fill in and return what may follow `path` in request `row`; None past its end.

        The matcher is left where it was: after the committed tokens.
        """
        matcher: Any = self._reqs[row].grammar
        place = row * self._width + node
        for token in path:
            matcher.accept_token(token)
        ended = matcher.is_terminated()
        if not ended:
            matcher.fill_vocab_mask(self._bits, place)
        if path:
            matcher.rollback(len(path))
        return None if ended else self._bits[place]

    def first(self, width: int, device: torch.device | str) -> GrammarMask:
        """The masks of the first `width` nodes of each tree, on the device."""
        bits = self._bits.view(len(self._reqs), self._width, -1)[:, :width].flatten(0, 1)
        return GrammarMask(self._handle, bits.to(device, non_blocking=True))


def constrain(
    tree: DraftTree,
    reqs: list[Req],
    scores: torch.Tensor | ConditionalHead | None,
    vocabulary: VocabularyShard,
    vocab: int,
    *,
    chain: bool,
) -> tuple[DraftTree, NodeMasks]:
    """Replace the trees of requests with a grammar by the best that it allows.

    Args:
        tree: the batch's trees as built without grammars.
        reqs: the batch's requests; their matchers stand after the committed tokens.
        scores: see `draft_candidates`.
        chain: build chains.
    Returns:
        The trees, and the masks of all their nodes.
    """
    rows = [row for row, req in enumerate(reqs) if req.grammar is not None]
    masks = NodeMasks(reqs, tree.width, vocab)
    roots = tree.tokens[rows, 0].tolist()
    offered = draft_candidates(scores, rows, vocabulary)
    grown = [
        build_constrained_tree(one, root, tree.budget, partial(masks.allowed, row), chain=chain)
        for row, root, one in zip(rows, roots, offered, strict=True)
    ]
    return tree.with_rows(rows, grown), masks
