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
top-k gives an order without ties: the same on every device and on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from ddtree.mask import ancestor_visibility

# Vocabulary entries per chunk in the two-stage top-k.
_CHUNK = 32
# Elements of scratch for the CPU log-sum-exp: two cores' worth of second-level cache.
_SCRATCH = 1 << 17
_LOG2_E = 1.4426950408889634


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
        bound = self.tokens.shape[1] - 1
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

    def to(self, device: torch.device | str) -> DraftTree:
        """The same trees on another device."""
        fields = (self.tokens, self.parents, self.depths, self.scores, self.valid)
        return DraftTree(*(field.to(device) for field in fields), max_depth=self.max_depth)

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
            "valid nodes come before invalid ones": self.valid[:, :1].expand_as(self.valid)
            & (self.valid | ~self.valid.flip(1).cummax(1).values.flip(1)),
            "the root and invalid nodes have parent -1": drafted | (self.parents == -1),
            "a parent comes before its child": ~drafted
            | ((self.parents >= 0) & (self.parents < nodes)),
            "a parent is valid": ~drafted | self.valid.gather(1, parents),
            "a child is one deeper than its parent": ~drafted
            | (self.depths == self.depths.gather(1, parents) + 1),
            "the root and invalid nodes have depth 0": drafted | (self.depths == 0),
            "depths stay within max_depth": self.depths <= self.max_depth,
            "scores descend": ~drafted | (self.scores <= self.scores.roll(1, 1)),
            "the root scores 0": (nodes > 0) | (self.scores == 0),
            "invalid nodes score -inf": self.valid | (self.scores == -inf),
            "tokens are not negative": self.tokens >= 0,
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
        then by the token's rank (logit, then smaller id).
    Raises:
        TreeError: shapes, dtypes or the budget are not as stated.
    """
    _check_input(draft_logits, root_tokens, budget)
    batch, horizon, vocab = draft_logits.shape
    levels = min(horizon, budget)
    if levels == 0 or batch == 0:
        return _root_only(root_tokens, budget)
    costs, tokens = top_tokens(draft_logits[:, :levels], min(budget, vocab))
    return _assemble(costs, tokens, root_tokens, budget, chain_seed)


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


def _root_only(root_tokens: Tensor, budget: int) -> DraftTree:
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


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens per position, in one pass over the vocabulary.

    Args:
        logits: float [B, L, V].
        k: 1 to V.
    Returns:
        costs: float32 [B, L, k], negative log-probabilities in ascending order; +inf for tokens
            that do not exist and for whole positions that hold NaN or +inf.
        tokens: int64 [B, L, k]; equal logits in ascending order of id.
    """
    vocab = logits.shape[-1]
    if k * _CHUNK < vocab:
        # A top-k entry lies in one of the k chunks with the largest maxima.
        chunk_max = _chunk_maxima(logits)
        row_max = chunk_max.amax(-1)
        chunks = _descending_top(chunk_max, torch.arange(chunk_max.shape[-1], device=logits.device), k)
        offsets = torch.arange(_CHUNK, device=logits.device)
        ids = (chunks[..., None] * _CHUNK + offsets).flatten(-2)
        values = logits.gather(-1, ids.clamp(max=vocab - 1)).float()
        values = torch.where(ids < vocab, values, -inf)
    else:
        values = logits.float()
        row_max = values.amax(-1)
        ids = torch.arange(vocab, device=logits.device)
    # The clamp only matters for positions that hold NaN, which are thrown away below.
    tokens = _descending_top(values, ids, k).clamp(max=vocab - 1)
    costs = _log_sum_exp(logits, row_max)[..., None] - logits.gather(-1, tokens).float()
    return torch.where(costs.isfinite(), costs, inf), tokens


def _chunk_maxima(logits: Tensor) -> Tensor:
    """float32 [B, L, ceil(V / _CHUNK)]."""
    maxima = logits.unfold(-1, _CHUNK, _CHUNK).amax(-1).float()
    rest = logits.shape[-1] % _CHUNK
    if rest:
        maxima = torch.cat([maxima, logits[..., -rest:].amax(-1, keepdim=True).float()], dim=-1)
    return maxima


def _descending_top(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Ids (below 2**31) of the k largest float32 values, equal values in ascending order of id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes the two zeros one value
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # now ordered as signed integers
    keys = (bits.to(torch.int64) << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (keys.topk(k, dim=-1).values & 0x7FFFFFFF)


def _log_sum_exp(logits: Tensor, row_max: Tensor) -> Tensor:
    """float32 log-sum-exp over the vocabulary of [B, L, V] given its maxima [B, L]."""
    if logits.device.type != "cpu":
        return torch.logsumexp(logits.float(), dim=-1)
    # In blocks that stay in cache: several times faster than torch.logsumexp, which streams
    # temporaries of the whole input through memory.
    vocab = logits.shape[-1]
    rows, maxima = logits.reshape(-1, vocab), row_max.reshape(-1, 1)
    step = max(1, _SCRATCH // vocab)
    scratch = torch.empty(step, vocab)
    sums = torch.empty(len(rows))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        scaled = torch.sub(block, maxima[start : start + step], out=scratch[: len(block)])
        torch.exp2(scaled.mul_(_LOG2_E), out=scaled)
        torch.sum(scaled, dim=-1, out=sums[start : start + step])
    return sums.log_().view_as(row_max) + row_max


@dataclass(frozen=True)
class _Plan:
    """The pairs (parent rank, token rank) that can matter, for one (budget, k, levels).

    Level l holds prefixes of depth l + 1. *Places* number the kept prefixes of all levels in a row.
    """

    parent_ranks: tuple[Tensor, ...]  # per level: int64 [pairs], rank within the level before
    token_ranks: tuple[Tensor, ...]  # per level: int64 [pairs]
    keep: tuple[int, ...]  # per level: prefixes kept
    chain: Tensor  # int64 [levels], the place of each level's best prefix, the argmax chain
    depth: Tensor  # int64 [places]
    first_pair: Tensor  # int64 [places], where the place's level starts in the joined pair lists
    parent_base: Tensor  # int64 [places], one more than the place of the parent level's first
    all_parent_ranks: Tensor  # int64 [all pairs]
    all_token_ranks: Tensor  # int64 [all pairs]


@lru_cache(maxsize=64)
def _plan(budget: int, k: int, levels: int, device: torch.device) -> _Plan:
    pairs, keep = [], []
    parents = 1
    for level in range(levels):
        ranks = [(i, j) for i in range(parents) for j in range(min(k, _children(i, level, budget)))]
        pairs.append(torch.tensor(ranks, dtype=torch.int64).T.contiguous())
        # The prefix of rank r has r before it on its level and one ancestor on each level above.
        parents = min(len(ranks), budget - level)
        keep.append(parents)
    starts = torch.tensor([0, *keep[:-1]]).cumsum(0)
    pair_starts = torch.tensor([0, *(p.shape[1] for p in pairs[:-1])]).cumsum(0)
    parent_base = torch.cat([torch.zeros(1, dtype=torch.int64), starts[:-1] + 1])
    level_of = torch.repeat_interleave(torch.arange(levels), torch.tensor(keep))
    joined = torch.cat(pairs, dim=1).to(device)
    return _Plan(
        parent_ranks=tuple(p[0].to(device) for p in pairs),
        token_ranks=tuple(p[1].to(device) for p in pairs),
        keep=tuple(keep),
        chain=starts.to(device),
        depth=(level_of + 1).to(device),
        first_pair=pair_starts[level_of].to(device),
        parent_base=parent_base[level_of].to(device),
        all_parent_ranks=joined[0],
        all_token_ranks=joined[1],
    )


def _children(parent_rank: int, level: int, budget: int) -> int:
    """How many of a parent's children can be among the best `budget` prefixes."""
    if level == 0:
        return budget
    return max(0, (budget - (level - 1)) // (parent_rank + 1) - 1)


def _cheapest(costs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of float32 costs >= 0 [B, n], ascending, ties by index: (costs, indices)."""
    index = torch.arange(costs.shape[-1], device=costs.device)
    keys = (costs.view(torch.int32).to(torch.int64) << 32) | index
    best = keys.topk(k, dim=-1, largest=False).values
    return (best >> 32).to(torch.int32).view(torch.float32), best & 0xFFFFFFFF


def _search_levels(costs: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Costs (float32) and pair indices within the level (int64) of every place, [B, places]."""
    parents = costs.new_zeros(costs.shape[0], 1)
    place_costs, place_pairs = [], []
    for level, keep in enumerate(plan.keep):
        tokens = costs[:, level].index_select(1, plan.token_ranks[level])
        totals = parents.index_select(1, plan.parent_ranks[level]) + tokens
        parents, pairs = _cheapest(totals, keep)
        place_costs.append(parents)
        place_pairs.append(pairs)
    return torch.cat(place_costs, dim=1), torch.cat(place_pairs, dim=1)


def _assemble(
    costs: Tensor, tokens: Tensor, root_tokens: Tensor, budget: int, chain_seed: bool
) -> DraftTree:
    """Best-first tree from sorted per-position costs and tokens, both [B, levels, k]."""
    batch, levels, k = costs.shape
    plan = _plan(budget, k, levels, costs.device)
    place_costs, place_pairs = _search_levels(costs, plan)
    nodes = min(budget, place_costs.shape[1])
    if chain_seed:
        # No other prefix costs 0: a token that is not the argmax costs at least log 2.
        seeded = place_costs.clone()
        seeded[:, plan.chain] = torch.where(place_costs[:, plan.chain].isfinite(), 0.0, inf)
        chosen = _cheapest(seeded, nodes)[1].sort(dim=1).values
        node_costs, rank = _cheapest(place_costs.gather(1, chosen), nodes)
        places = chosen.gather(1, rank)
    else:
        node_costs, places = _cheapest(place_costs, nodes)

    pairs = plan.first_pair[places] + place_pairs.gather(1, places)
    depths = plan.depth[places]
    node_of_place = places.new_zeros(batch, place_costs.shape[1] + 1)  # slot 0 is the root
    order = torch.arange(1, nodes + 1, device=costs.device).expand(batch, -1)
    node_of_place.scatter_(1, places + 1, order)
    parents = node_of_place.gather(1, plan.parent_base[places] + plan.all_parent_ranks[pairs])
    choices = (depths - 1) * k + plan.all_token_ranks[pairs]

    tree = _root_only(root_tokens, budget)
    valid = node_costs.isfinite()
    drafted = slice(1, nodes + 1)
    tree.tokens[:, drafted] = torch.where(valid, tokens.flatten(1).gather(1, choices), 0)
    tree.parents[:, drafted] = torch.where(valid, parents, -1)
    tree.depths[:, drafted] = torch.where(valid, depths, 0)
    tree.scores[:, drafted] = -node_costs
    tree.valid[:, drafted] = valid
    return replace(tree, max_depth=levels)


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
        return _root_only(root_tokens, 0)
    costs, tokens = top_tokens(draft_logits, 1)
    return _assemble(costs, tokens, root_tokens, levels, chain_seed=False)
