"""How many experts a verify forward activates: the part of a MoE target's cost that a width adds.

While a forward is bound by memory, its cost is that of the weights it reads. A dense layer is read
once, whatever the width; of a MoE layer every expert that some node chose is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.engine.target import EngineError


def distinct_experts(choices: Tensor) -> int:
    """Experts that at least one token chose, from int64 [tokens, experts per token]."""
    return int(choices.unique().numel())


def expected_experts(experts: int, per_token: int, tokens: int) -> float:
    """Expected distinct experts of `tokens` tokens that choose independently and uniformly.

    An upper guide: real routers favour some experts, and the nodes of a tree resemble each other.
    """
    return experts * (1 - (1 - per_token / experts) ** tokens)


@contextmanager
def record_experts(model: nn.Module) -> Iterator[list[list[int]]]:
    """Within this scope, collect the distinct experts of every forward of a transformers model.

    Yields:
        A list that grows by one entry per forward: the distinct experts of each MoE layer.
    Raises:
        EngineError: the model has no router that names its choices.
    """
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    counts: list[list[int]] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        counts.append([])

    def count(module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple) or output[-1].dtype != torch.int64:
            raise EngineError(
                f"the router {type(module).__name__} does not return the experts it chose; "
                f"count them on a Qwen-MoE, Mixtral or gpt-oss target"
            )
        counts[-1].append(distinct_experts(output[-1]))

    if not routers:
        raise EngineError(
            f"{type(model).__name__} has no expert router; a dense target reads the same weights "
            f"at every width"
        )
    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [router.register_forward_hook(count) for router in routers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
