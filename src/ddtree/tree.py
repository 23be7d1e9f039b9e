"""The draft tree and its best-first builder (DDTree, arXiv 2604.12989, Algorithm 1).

A DFlash drafter gives one distribution per future position. Under their product the expected
accepted length of a tree is the sum of its prefixes' probabilities (Proposition 1), so the best
tree of a given budget holds the `budget` most probable prefixes (Proposition 2). The paper finds
them with a heap; here they are found level by level for a whole batch on any device:

* a prefix of depth d is a prefix of depth d - 1 and one more token, so each level needs only the
  best prefixes of the level before;
* with both lists sorted, the i-th parent's j-th child has at least (i + 1)(j + 2) + d - 2
  prefixes before or equal to it (its siblings and cousins that dominate it, their parents, one
  ancestor on each level above), so few pairs can be among the best `budget`;
* the pairs that can are the same for every input: they are listed once and cached.

Costs are negative log-probabilities, which are never negative, and the bits of a non-negative
float sort like an integer. A cost and its index therefore make one int64 key, and a plain integer
top-k gives an order without ties: the same on every device and on every rank. The vocabulary is
searched the same way, by gaps to the maximum: the best k tokens lie in the k chunks with the
largest maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import inf
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddtree.mask import ancestor_visibility

# Vocabulary entries per chunk in the two-stage top-k.
_CHUNK = 32
# Elements per block of the CPU vocabulary pass: stays in cache, and long enough that the cost of
# starting an operation does not show.
_SCRATCH = 1 << 19
_LOW_HALF = 0xFFFFFFFF


class TreeError(ValueError):
    """A tree or the input to a builder breaks a stated invariant."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees; node 0 is the root, a parent comes before its children.

    Attributes:
        tokens: int64 [B, N] vocabulary ids; N = budget + 1. 0 where invalid.
        parents: int64 [B, N] node indices; -1 for the root and where invalid.
        depths: int64 [B, N]; the root has 0. 0 where invalid.
        scores: float32 [B, N] cumulative log-probability (nats); the root has 0, -inf where
            invalid. Nodes are in descending order of score.
        valid: bool [B, N]; False where fewer than `budget` prefixes exist.
        max_depth: a bound on `depths` known without asking the device, at most N - 1.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    valid: Tensor
    max_depth: int = -1

    def __post_init__(self) -> None:
        bound = self.tokens.shape[-1] - 1
        if not 0 <= self.max_depth <= bound:
            object.__setattr__(self, "max_depth", bound)

    @property
    def width(self) -> int:
        """Tokens verified per request: budget + 1."""
        return self.tokens.shape[1]

    @property
    def budget(self) -> int:
        """Drafted nodes, the root not counted."""
        return self.width - 1

    def visibility(self) -> Tensor:
        """bool [B, N, N]: ``[b, i, j]`` when j is i or an ancestor of i."""
        return ancestor_visibility(self.parents)

    def positions(self, prefix_lens: Tensor) -> Tensor:
        """int64 [B, N] sequence positions: committed tokens before the root (int64 [B]) + depth."""
        return prefix_lens[:, None] + self.depths

    def first(self, width: int) -> DraftTree:
        """The first `width` nodes: the best-first tree of that width (without a chain seed)."""
        return DraftTree(
            tokens=self.tokens[:, :width],
            parents=self.parents[:, :width],
            depths=self.depths[:, :width],
            scores=self.scores[:, :width],
            valid=self.valid[:, :width],
            max_depth=min(self.max_depth, width - 1),
        )

    def with_rows(self, rows: list[int], trees: Sequence[DraftTree]) -> DraftTree:
        """The batch with other trees of the same width, of batch 1, in some of its rows."""
        index = torch.tensor(rows, device=self.tokens.device)

        def field(name: str) -> Tensor:
            new = torch.cat([getattr(tree, name) for tree in trees])
            return getattr(self, name).index_copy(0, index, new.to(index.device))

        return DraftTree(
            tokens=field("tokens"),
            parents=field("parents"),
            depths=field("depths"),
            scores=field("scores"),
            valid=field("valid"),
            max_depth=max(self.max_depth, *(tree.max_depth for tree in trees)),
        )

    def to(self, device: torch.device | str) -> DraftTree:
        """The same trees on another device."""
        return DraftTree(
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            depths=self.depths.to(device),
            scores=self.scores.to(device),
            valid=self.valid.to(device),
            max_depth=self.max_depth,
        )

    def check(self) -> None:
        """Verify every invariant (synchronises the device).

        Raises:
            TreeError: naming the first broken invariant and where it is broken.
        """
        _check_fields(self)
        nodes = torch.arange(self.width, device=self.tokens.device).expand_as(self.tokens)
        drafted = self.valid & (nodes > 0)
        parents = self.parents.clamp(min=0)
        same_parent = self.parents[:, :, None] == self.parents[:, None, :]
        same_token = self.tokens[:, :, None] == self.tokens[:, None, :]
        both = drafted[:, :, None] & drafted[:, None, :] & (nodes[:, :, None] > nodes[:, None, :])
        rules = {
            "the root is valid": self.valid | (nodes > 0),
            "valid nodes come before invalid ones": ~drafted | self.valid.roll(1, 1),
            "the root and invalid nodes have parent -1": drafted | (self.parents == -1),
            "a parent comes before its child": ~drafted
            | ((self.parents >= 0) & (self.parents < nodes)),
            "a child is one deeper than its parent": ~drafted
            | (self.depths == self.depths.gather(1, parents) + 1),
            "the root and invalid nodes have depth 0": drafted | (self.depths == 0),
            "depths stay within max_depth": self.depths <= self.max_depth,
            "scores descend": ~drafted | (self.scores <= self.scores.roll(1, 1)),
            "the root scores 0": (nodes > 0) | (self.scores == 0),
            "invalid nodes, and only they, score -inf": self.valid == (self.scores > -inf),
            "tokens are not negative": self.tokens >= 0,
            "invalid nodes have token 0": self.valid | (self.tokens == 0),
            "siblings have different tokens": ~(both & same_parent & same_token).any(-1),
        }
        for rule, holds in rules.items():
            if not bool(holds.all()):
                row, node = (~holds).nonzero()[0].tolist()
                raise TreeError(f"broken tree: {rule}, but not at batch row {row}, node {node}")


def _check_fields(tree: DraftTree) -> None:
    expected = {
        "tokens": torch.int64,
        "parents": torch.int64,
        "depths": torch.int64,
        "scores": torch.float32,
        "valid": torch.bool,
    }
    shape = tree.tokens.shape
    if len(shape) != 2 or shape[1] < 1:
        raise TreeError(f"broken tree: tokens have shape {list(shape)}, expected [B, N] with N > 0")
    for name, dtype in expected.items():
        field = getattr(tree, name)
        if field.shape != shape or field.dtype != dtype:
            raise TreeError(
                f"broken tree: {name} is {field.dtype} {list(field.shape)}, "
                f"expected {dtype} {list(shape)}"
            )


def build_tree(
    draft_logits: Tensor, root_tokens: Tensor, budget: int, *, chain_seed: bool = False
) -> DraftTree:
    """Build the best-first draft tree of every request in a batch, without a device sync.

    Args:
        draft_logits: float [B, L, V]; position l predicts the token at depth l + 1. A token whose
            logit is -inf does not exist. A position that holds NaN or +inf yields no nodes, so a
            poisoned drafter costs speed and never correctness.
        root_tokens: int64 [B], the last committed token of each request.
        budget: drafted nodes, at least 0.
        chain_seed: put the argmax chain in the tree whatever its score. The tree's expected
            length can then be lower, and its acceptance is never less than the chain's.
    Returns:
        The `budget` prefixes with the largest product of per-position probabilities, in
        descending order of score; equal scores go shallow first, then by the parent's order,
        then by the token's rank (probability, then smaller id).
    Raises:
        TreeError: shapes, dtypes or the budget are not as stated.
    """
    _check_input(draft_logits, root_tokens, budget)
    batch, horizon, vocab = draft_logits.shape
    levels = min(horizon, budget)
    if levels == 0 or batch == 0:
        return root_tree(root_tokens, budget)
    top = top_tokens(draft_logits[:, :levels], min(budget, vocab))
    return tree_of_tokens(top, root_tokens, budget, chain_seed=chain_seed)


def _check_input(draft_logits: Tensor, root_tokens: Tensor, budget: int) -> None:
    if draft_logits.dim() != 3 or not draft_logits.is_floating_point():
        raise TreeError(
            f"draft_logits is {draft_logits.dtype} {list(draft_logits.shape)}; "
            f"expected a floating-point [B, L, V]"
        )
    if root_tokens.shape != draft_logits.shape[:1] or root_tokens.dtype != torch.int64:
        raise TreeError(
            f"root_tokens is {root_tokens.dtype} {list(root_tokens.shape)}; "
            f"expected int64 [{draft_logits.shape[0]}]"
        )
    if budget < 0:
        raise TreeError(f"budget is {budget}; a tree has 0 or more drafted nodes")
    if draft_logits.shape[2] == 0:
        raise TreeError("draft_logits has an empty vocabulary (V = 0)")


def root_tree(root_tokens: Tensor, budget: int = 0) -> DraftTree:
    """Plain decoding's trees: the roots (int64 [B]) and `budget` invalid nodes."""
    shape = (root_tokens.shape[0], budget + 1)
    device = root_tokens.device
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    tokens[:, 0] = root_tokens
    scores = torch.full(shape, -inf, device=device)
    scores[:, 0] = 0
    return DraftTree(
        tokens=tokens,
        parents=torch.full(shape, -1, dtype=torch.int64, device=device),
        depths=torch.zeros(shape, dtype=torch.int64, device=device),
        scores=scores,
        valid=scores == 0,
        max_depth=0,
    )


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The most probable tokens of every position, all that a tree needs of the logits.

    Attributes:
        costs: float32 [B, L, k], negative log-probabilities in ascending order; +inf for tokens
            that do not exist and for whole positions that hold NaN or +inf.
        tokens: int64 [B, L, k]; equal costs in ascending order of id, the argmax first.
        totals: float32 [B, L], log of the sum of exp(logit) over the vocabulary.
    """

    costs: Tensor
    tokens: Tensor
    totals: Tensor


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    """The k most probable tokens per position, in one pass over the vocabulary.

    Args:
        logits: float [B, L, V].
        k: 1 to V.
    """
    batch, levels, vocab = logits.shape
    rows = logits.reshape(-1, vocab).contiguous()
    if vocab % _CHUNK:
        rows = pad(rows, (0, -vocab % _CHUNK), value=-inf)
    chunk_max, row_max, log_sum = _vocabulary_pass(rows)
    row_max = row_max + 0.0  # a maximum of -0.0 would give gaps of -0.0, whose bits sort first
    chunks = chunk_max.shape[1]
    ids = torch.arange(rows.shape[1], device=rows.device)
    if k < chunks:
        # A top-k entry lies in one of the k chunks with the largest maxima.
        keys = _keys(row_max - chunk_max, ids[:chunks])
        best = keys.topk(k, largest=False, sorted=False).values & _LOW_HALF
        picked = best + torch.arange(0, len(rows) * chunks, chunks, device=rows.device)[:, None]
        values = rows.view(-1, _CHUNK).index_select(0, picked.flatten()).view(len(rows), -1)
        ids = (best[..., None] * _CHUNK + ids[:_CHUNK]).flatten(1)
    else:
        values = rows
    # Gaps to the maximum are never negative, so their bits sort like integers.
    best = _keys(row_max - values, ids).topk(k, largest=False).values
    costs = _cost_half(best) + log_sum
    # The clamp only matters for positions that hold NaN, which are thrown away here.
    tokens = (best & _LOW_HALF).clamp_(max=vocab - 1)
    costs = torch.where(costs.isfinite(), costs, inf)
    totals = torch.where(row_max == -inf, -inf, row_max + log_sum)  # a row without tokens sums to 0
    shape = (batch, levels, k)
    return TopTokens(costs.view(shape), tokens.view(shape), totals.view(batch, levels))


def merge_top_tokens(shards: TopTokens, k: int) -> TopTokens:
    """The top tokens of a vocabulary from those of its shards (tensor parallelism).

    Args:
        shards: fields with one more dimension in front, the shard; tokens have their ids in the
            whole vocabulary.
        k: at most the number of tokens of all shards together.
    """
    costs, tokens, totals = shards.costs, shards.tokens, shards.totals
    whole = totals.logsumexp(0)
    # A shard's cost is measured from its own total. Rounding must not make a cost negative.
    costs = (costs + (whole - totals)[..., None]).clamp_(min=0) + 0.0
    costs = torch.where(costs.isfinite(), costs, inf)
    keys = _keys(costs, tokens).movedim(0, -2).flatten(-2)
    best = keys.topk(k, largest=False).values
    return TopTokens(_cost_half(best), best & _LOW_HALF, whole)


def _vocabulary_pass(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk maxima, row maxima and log(sum(exp(row - row maximum))) of [R, V], V whole chunks.

    Returns:
        float32 [R, V / _CHUNK], [R, 1], [R, 1].
    """
    count, vocab = rows.shape
    if kernels := _triton_kernels(rows.device):
        return kernels.vocabulary_pass(rows, _CHUNK)
    if rows.device.type != "cpu":
        chunk_max = rows.view(count, -1, _CHUNK).amax(-1).float()
        row_max = chunk_max.amax(-1, keepdim=True)
        log_sum = rows.float().logsumexp(-1, keepdim=True) - row_max
        return chunk_max, row_max, log_sum.clamp_(min=0)
    # In blocks that stay in cache: several times faster than torch.logsumexp, which streams
    # temporaries of the whole input through memory.
    step = max(1, _SCRATCH // vocab)
    scratch = torch.empty(min(step, count), vocab)
    chunk_max = torch.empty(count, vocab // _CHUNK)
    # Partial sums keep a row's rounding apart from its block: torch splits a lone sum by threads.
    sums = torch.empty(count, _CHUNK)
    blocks = (tensor.split(step) for tensor in (rows, chunk_max, sums))
    for block, maxima, partial_sums in zip(*blocks, strict=True):
        block, scaled = block.float(), scratch[: len(block)]
        torch.amax(block.unflatten(1, (-1, _CHUNK)), dim=-1, out=maxima)
        torch.sub(block, maxima.amax(-1, keepdim=True), out=scaled)
        torch.exp(scaled, out=scaled)
        torch.sum(scaled.unflatten(1, (_CHUNK, -1)), dim=-1, out=partial_sums)
    log_sum = sums.sum(-1, keepdim=True).clamp_(min=1).log_()
    return chunk_max, chunk_max.amax(-1, keepdim=True), log_sum


@lru_cache
def _triton_kernels(device: torch.device) -> ModuleType | None:
    """The module of Triton kernels where it can serve the device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("ddtree.tree_cuda")


def _keys(costs: Tensor, index: Tensor) -> Tensor:
    """int64 keys that sort by cost (float32 >= 0), then by index (int64, broadcast to costs)."""
    high = costs.view(torch.int32).to(torch.int64)
    return high.bitwise_left_shift_(32).bitwise_or_(index)


def _cost_half(keys: Tensor) -> Tensor:
    """The float32 costs inside int64 keys, a strided view (of little-endian words)."""
    return keys.view(torch.float32)[..., 1::2]


@dataclass(frozen=True)
class _Plan:
    """The pairs (parent rank, token rank) that can matter, for one (budget, k, levels).

    Level l holds prefixes of depth l + 1. Pairs number all levels' pairs in a row and *places* the
    prefixes kept of them; pair 0 and place 0 are the root.
    """

    sizes: tuple[int, ...]  # pairs of the root (one) and of each level
    keep: tuple[int, ...]  # per level: prefixes kept
    parent_halves: tuple[Tensor, ...]  # per level: int64 [its pairs], 2 * parent rank + 1
    token_index: Tensor  # int64 [pairs - 1], level * k + token rank
    pairs: Tensor  # int64 [pairs], 0, 1, 2, ...
    table: Tensor  # int64 [pairs, 3]: depth, 1 + token index (0 for the root), the parent's place
    spans: Tensor  # int64 [levels, 4]: first pair, pairs, first place, places

    @property
    def places(self) -> int:
        return 1 + sum(self.keep)

    @property
    def chain(self) -> Tensor:
        """int64 [levels]: the place of each level's best prefix, the argmax chain."""
        return self.spans[:, 2]


@lru_cache(maxsize=64)
def _plan(budget: int, k: int, levels: int, device: torch.device) -> _Plan:
    table, spans, parent_halves = [(0, 0, 0)], [], []
    first_parent, parents = 0, 1
    for level in range(levels):
        ranks = [(i, j) for i in range(parents) for j in range(min(k, _children(i, level, budget)))]
        # The prefix of rank r has r before it on its level and one ancestor on each level above.
        keep = min(len(ranks), budget - level)
        spans.append((len(table), len(ranks), first_parent + parents, keep))
        table += [(level + 1, 1 + level * k + j, first_parent + i) for i, j in ranks]
        parent_halves.append(torch.tensor([2 * i + 1 for i, _ in ranks], device=device))
        first_parent, parents = first_parent + parents, keep
    columns = torch.tensor(table, device=device)
    return _Plan(
        sizes=(1, *(span[1] for span in spans)),
        keep=tuple(span[3] for span in spans),
        parent_halves=tuple(parent_halves),
        token_index=columns[1:, 1] - 1,
        pairs=torch.arange(len(table), device=device),
        table=columns,
        spans=torch.tensor(spans, device=device),
    )


def _children(parent_rank: int, level: int, budget: int) -> int:
    """How many of a parent's children can be among the best `budget` prefixes."""
    if level == 0:
        return budget
    return max(0, (budget - (level - 1)) // (parent_rank + 1) - 1)


def _search_levels(costs: Tensor, plan: _Plan) -> Tensor:
    """Keys (cost, pair) of every place, int64 [B, places], from sorted costs [B, levels, k]."""
    if kernels := _triton_kernels(costs.device):
        return kernels.search_levels(
            costs.contiguous(), plan.table, plan.spans, max(plan.sizes), plan.places
        )
    keys = plan.pairs.expand(len(costs), -1).clone()
    token_costs = costs.flatten(1).index_select(1, plan.token_index).split(plan.sizes[1:], 1)
    best, *levels = keys.split(plan.sizes, 1)  # the root, of cost 0, and views to be filled
    totals = _cost_half(keys).split(plan.sizes, 1)[1:]
    places = [best]
    for level, keep in enumerate(plan.keep):
        parent_costs = best.view(torch.float32).index_select(1, plan.parent_halves[level])
        torch.add(parent_costs, token_costs[level], out=totals[level])
        best = levels[level].topk(keep, largest=False).values
        places.append(best)
    return torch.cat(places, dim=1)


def tree_of_tokens(
    top: TopTokens, root_tokens: Tensor, budget: int, *, chain_seed: bool = False
) -> DraftTree:
    """`build_tree` after its pass over the vocabulary.

    Args:
        top: of 1 to `budget` levels, with min(budget, vocabulary) tokens each.
        root_tokens, budget, chain_seed: as for `build_tree`; the budget is at least 1.
    """
    _, levels, k = top.costs.shape
    plan = _plan(budget, k, levels, top.costs.device)
    place_keys = _search_levels(top.costs, plan)
    width = min(budget + 1, place_keys.shape[1])
    if chain_seed:
        chosen = _with_chain(place_keys, plan.chain, width)
        keys, rank = place_keys.gather(1, chosen).topk(width, largest=False)
        places = chosen.gather(1, rank)
    else:
        keys, places = place_keys.topk(width, largest=False)

    return _trees(keys, places, plan, top.tokens, root_tokens, budget)


def _with_chain(place_keys: Tensor, chain: Tensor, width: int) -> Tensor:
    """int64 [B, width], in no order: the places of the argmax chain and the best others."""
    seeded = place_keys.clone()
    costs = _cost_half(seeded)
    # No other prefix costs 0: a token that is not the argmax costs at least log 2.
    costs[:, chain] = torch.where(costs[:, chain] < inf, 0.0, inf)
    return seeded.topk(width, largest=False, sorted=False).indices


def _trees(
    keys: Tensor, places: Tensor, plan: _Plan, tokens: Tensor, root_tokens: Tensor, budget: int
) -> DraftTree:
    """Node fields from the keys and places of the nodes in order, both [B, <= budget + 1]."""
    pairs = (keys & _LOW_HALF).flatten()
    depths, choices, parent_places = (
        plan.table.index_select(0, pairs).view(*keys.shape, 3).unbind(2)
    )
    chosen = torch.cat([root_tokens[:, None], tokens.flatten(1)], dim=1).gather(1, choices)
    parents = _nodes_at(places, parent_places, plan.places)
    return _tree_of(_cost_half(keys), chosen, parents, depths, budget, tokens.shape[1])


def _nodes_at(places: Tensor, wanted: Tensor, count: int) -> Tensor:
    """The nodes at the `wanted` ones of `count` places, int64 [B, W]; `places` is node by node."""
    node_of_place = places.new_empty(len(places), count)
    nodes = torch.arange(places.shape[1], device=places.device)
    node_of_place.scatter_(1, places, nodes.expand_as(places))
    return node_of_place.gather(1, wanted)


def _tree_of(
    costs: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, budget: int, max_depth: int
) -> DraftTree:
    """A tree from fields [B, <= budget + 1] in order of cost; what costs +inf is invalid."""
    valid = costs < inf
    parents[:, 0] = -1
    missing = budget + 1 - costs.shape[1]  # so many prefixes fewer, whatever the input

    def field(values: Tensor, where_invalid: float) -> Tensor:
        values = torch.where(valid, values, where_invalid)
        return pad(values, (0, missing), value=where_invalid) if missing else values

    return DraftTree(
        tokens=field(tokens, 0),
        parents=field(parents, -1),
        depths=field(depths, 0),
        scores=field(0.0 - costs, -inf),
        valid=field(valid, False),
        max_depth=max_depth,
    )


def build_chain(draft_logits: Tensor, root_tokens: Tensor) -> DraftTree:
    """The argmax chain as a tree: what linear DFlash verifies.

    Args:
        draft_logits: float [B, L, V], as for `build_tree`.
        root_tokens: int64 [B].
    Returns:
        Trees of L nodes below the root, one per depth.
    """
    levels = draft_logits.shape[1]
    _check_input(draft_logits, root_tokens, levels)
    if levels == 0:
        return root_tree(root_tokens)
    return tree_of_tokens(top_tokens(draft_logits, 1), root_tokens, levels)
