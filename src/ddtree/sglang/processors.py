"""Custom logit processors at the nodes of a tree.

A processor may read its request (`custom_params["__req__"]`), and what it wants to see there is the
output so far. At a node that is the committed output and the drafted tokens on the path to it. The
host must know the committed output, so the launch demands `--disable-overlap-schedule`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ddtree.tree import DraftTree

_REQUEST = "__req__"


class RequestAtNode:
    """A request whose output ends at a node; in everything else the request itself."""

    def __init__(self, request: Any, path: list[int]) -> None:
        self._request = request
        self.output_ids = request.output_ids[:]
        self.output_ids.extend(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def apply_processors(logits: torch.Tensor, info: SamplingBatchInfo, tree: DraftTree) -> None:
    """Run the batch's processors over logits [B * N, V], in place, one row per node."""
    paths = _paths(tree)
    by_node = logits.view(*tree.tokens.shape, -1)
    for entry in info.custom_logit_processor.values():
        params = [
            _at_node(info.custom_params[row], path) for row in entry.rows for path in paths[row]
        ]
        selected = by_node.index_select(0, entry.indices)
        result = entry.processor(selected.flatten(0, 1), params)
        by_node.index_copy_(0, entry.indices, result.view_as(selected).to(logits.dtype))


def _paths(tree: DraftTree) -> list[list[list[int]]]:
    """By request and node: the drafted tokens from below the root down to the node."""
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([] if parent < 0 else [*paths[parent], token])
        found.append(paths)
    return found


def _at_node(params: Any, path: list[int]) -> Any:
    if not isinstance(params, dict) or _REQUEST not in params:
        return params
    return params | {_REQUEST: RequestAtNode(params[_REQUEST], path)}
