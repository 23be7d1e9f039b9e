"""Rounds of speculative decoding on a transformers model: ``draft build verify accept commit``.

Plain decoding, linear DFlash and DDTree are one loop that differs in the tree it verifies: the
root alone, the argmax chain, or the best-first tree. So they share prefill, sampling, stopping and
the cache, and a difference between their outputs can only come from the tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddtree import metrics
from ddtree.accept import SamplingRule, accept_path, choose_tokens
from ddtree.drafter import Drafter
from ddtree.engine.target import EngineError, check_target, open_target
from ddtree.tree import DraftTree, build_chain, build_tree, root_tree

MODES = ("ar", "dflash", "ddtree")
DEFAULT_BUDGET = 32


@dataclass(frozen=True)
class Round:
    """What one step of `decode` committed.

    Attributes:
        tokens: committed tokens, in order. The first item of a stream is the prefill: it commits
            one token and has no tree.
        tree: the verified tree, batch 1; None for the prefill.
        path: accepted node indices, root first.
    """

    tokens: list[int]
    tree: DraftTree | None = None
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: new tokens only; ends with an end-of-sequence token if one was chosen.
        accept_lengths: tokens committed by each round, the prefill's token not counted.
        stage_seconds: seconds by stage: prefill, draft, build, verify, accept, commit.
        finish_reason: ``stop`` (end of sequence) or ``length``.
    """

    tokens: list[int]
    accept_lengths: list[int]
    stage_seconds: dict[str, float]
    finish_reason: str

    @property
    def tau(self) -> float:
        """Mean tokens committed per round."""
        return metrics.tau(self.accept_lengths)


@dataclass(frozen=True)
class Request:
    """A checked request; construct it with `check_request`."""

    input_ids: Tensor  # int64 [1, P] on the target's device
    mode: str
    max_new_tokens: int
    budget: int
    chain_seed: bool
    rule: SamplingRule
    seed: int | None
    eos_token_ids: frozenset[int]


def generate(
    target: nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int],
    *,
    mode: str,
    max_new_tokens: int,
    budget: int | None = None,
    chain_seed: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    eos_token_ids: Collection[int] = (),
) -> Generation:
    """Generate from one prompt; see `check_request` for the arguments and the errors."""
    request = check_request(
        target, drafter, input_ids, mode=mode, max_new_tokens=max_new_tokens, budget=budget,
        chain_seed=chain_seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        seed=seed, eos_token_ids=eos_token_ids,
    )  # fmt: skip
    clock = metrics.StageClock(request.input_ids.device)
    rounds = list(decode(target, drafter, request, clock))
    tokens = [token for one in rounds for token in one.tokens]
    return Generation(
        tokens=tokens,
        accept_lengths=[len(one.tokens) for one in rounds[1:]],
        stage_seconds=clock.seconds(),
        finish_reason="stop" if tokens[-1] in request.eos_token_ids else "length",
    )


def check_request(
    target: nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int],
    *,
    mode: str,
    max_new_tokens: int,
    budget: int | None = None,
    chain_seed: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    eos_token_ids: Collection[int] = (),
) -> Request:
    """Check everything a request names, once, before any work.

    Args:
        target: transformers causal model.
        drafter: from `ddtree.drafter.load_drafter`; may be None for mode ``ar``.
        input_ids: prompt tokens, a list or int64 [P] or [1, P].
        mode: ``ar`` (plain), ``dflash`` (argmax chain) or ``ddtree``.
        max_new_tokens: at least 1; generation also ends at an end-of-sequence token.
        budget: drafted nodes per round: for ``ddtree`` 32 unless given, for ``dflash`` at most
            the horizon, which is the default.
        chain_seed: force the argmax chain into the tree.
        temperature, top_p, top_k, min_p: see `SamplingRule`.
        seed: of this request's own random numbers; None takes them from torch's generator.
        eos_token_ids: tokens that end the generation.
    Raises:
        EngineError: naming the value, the limit and the fix.
    """
    config = check_target(target)
    if mode not in MODES:
        raise EngineError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    if mode != "ar" and drafter is None:
        raise EngineError(f"mode {mode} needs a drafter; name one, or use mode ar")
    if budget is not None and budget < 0:
        raise EngineError(f"budget is {budget}; a tree has 0 or more drafted nodes")
    if max_new_tokens < 1:
        raise EngineError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    ids = _check_prompt(input_ids, config.vocab_size)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise EngineError(
            f"the prompt has {ids.shape[1]} tokens and max_new_tokens is {max_new_tokens}, "
            f"together above the target's {limit} positions; shorten the prompt or ask for at "
            f"most {max(limit - ids.shape[1], 0)} new tokens"
        )
    try:
        rule = SamplingRule(temperature, top_p, top_k, min_p)
    except ValueError as error:
        raise EngineError(str(error)) from None
    nodes = _nodes(mode, budget, drafter)
    device = next(target.parameters()).device
    return Request(
        ids.to(device), mode, max_new_tokens, nodes, chain_seed, rule, seed,
        frozenset(eos_token_ids),
    )  # fmt: skip


def _check_prompt(input_ids: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    ids = torch.as_tensor(input_ids)
    if ids.numel() == 0:
        raise EngineError("the prompt is empty; it must hold at least one token")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.is_floating_point():
        raise EngineError(
            f"input_ids is {ids.dtype} {list(ids.shape)}; expected integer [P] or [1, P]"
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise EngineError(
            f"the prompt holds token id {wrong}, outside the target's vocabulary of {vocab_size}; "
            f"tokenize it with the target's own tokenizer"
        )
    return ids.to(torch.int64)


def _nodes(mode: str, budget: int | None, drafter: Drafter | None) -> int:
    if mode == "ar" or drafter is None:
        return 0
    if mode == "ddtree":
        return DEFAULT_BUDGET if budget is None else budget
    horizon = drafter.block_size - 1
    return horizon if budget is None else min(budget, horizon)


@torch.inference_mode()
def decode(
    target_model: nn.Module, drafter: Drafter | None, request: Request, clock: metrics.StageClock
) -> Iterator[Round]:
    """The prefill and then one `Round` at a time, until the request is finished."""
    capacity = request.input_ids.shape[1] + request.max_new_tokens + request.budget
    draft = None
    if request.budget > 0 and drafter is not None:
        draft = _DraftSide(drafter, capacity)
    target = open_target(target_model, capacity, draft.drafter.target_layer_ids if draft else ())
    generator = None
    if request.seed is not None:
        generator = torch.Generator(target.device).manual_seed(request.seed)

    with clock.stage("prefill"):
        out = target.prefill(request.input_ids)
        root = choose_tokens(out.logits[:, -1], request.rule, generator)
        if draft:
            draft.extend(out.features)
        first = int(root)
    yield Round([first])
    remaining = request.max_new_tokens - 1
    done = first in request.eos_token_ids

    while remaining > 0 and not done:
        # A path of depth d commits d + 1 tokens, so deeper nodes than this could not be used.
        depth = remaining - 1
        tree = draft.tree(root, depth, request, clock) if draft and depth else root_tree(root)
        with clock.stage("verify"):
            out = target.verify(tree)
        with clock.stage("accept"):
            chosen = choose_tokens(out.logits, request.rule, generator)
            acceptance = accept_path(tree, chosen)
            path = acceptance.path[0].tolist()  # the round's one wait for the device
            path = path[: path.index(-1)] if -1 in path else path
            tokens = chosen[0, path].tolist()
        with clock.stage("commit"):
            target.commit(path)
            if draft:
                draft.extend(out.features, path)
        root = acceptance.next_tokens
        tokens, done = _cut(tokens, remaining, request.eos_token_ids)
        remaining -= len(tokens)
        yield Round(tokens, tree, tuple(path))


class _DraftSide:
    """The drafter and its context of one request."""

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        self.drafter = drafter
        self._context = drafter.new_cache(1, capacity)

    def extend(self, features: Tensor | None, path: list[int] | None = None) -> None:
        """Commit the features [1, n, K * H] of a forward, or of the nodes on a path of it."""
        assert features is not None, "the target was not asked for features"
        if path is not None:
            features = features[:, torch.tensor(path, device=features.device)]
        start, count = self._context.length, features.shape[1]
        positions = torch.arange(start, start + count, device=features.device)
        self.drafter.extend_context(self._context, features, positions[None])

    def tree(
        self, root: Tensor, depth: int, request: Request, clock: metrics.StageClock
    ) -> DraftTree:
        """Draft and build one round's tree, at most `depth` deep."""
        with clock.stage("draft"):
            position = torch.tensor([self._context.length], device=root.device)
            logits = self.drafter.draft_logits(self._context, root, position)[:, :depth]
        with clock.stage("build"):
            if request.mode == "dflash":
                return build_chain(logits[:, : request.budget], root)
            return build_tree(logits, root, request.budget, chain_seed=request.chain_seed)


def _cut(tokens: list[int], remaining: int, eos: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens a round may commit, and whether the request ends with them."""
    tokens = tokens[:remaining]
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1], True
    return tokens, False
