"""Who sees whom: ancestor visibility of a draft tree, dense, packed and windowed.

A node attends to the committed prefix, to its ancestors and to itself, and to nothing else
(DDTree, arXiv 2604.12989, section 3). All functions are batched and never synchronise the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_visibility(parents: Tensor) -> Tensor:
    """Ancestor-or-self relation from parent pointers, by pointer doubling.

    Args:
        parents: int64 [B, N]; -1 where a node has no parent (the root and invalid nodes).
    Returns:
        bool [B, N, N]; ``[b, i, j]`` is True when node j is node i or one of its ancestors.
    """
    batch, width = parents.shape
    # Column N is a sentinel that is its own ancestor and sees nothing, so that -1 needs no branch.
    jump = torch.full((batch, width + 1), width, dtype=torch.int64, device=parents.device)
    jump[:, :width] = torch.where(parents < 0, width, parents)
    seen = torch.zeros(batch, width + 1, width, dtype=torch.bool, device=parents.device)
    seen[:, :width] = torch.eye(width, dtype=torch.bool, device=parents.device)
    for _ in range((width - 1).bit_length()):
        seen = seen | seen.gather(1, jump[:, :, None].expand(-1, -1, width))
        jump = jump.gather(1, jump)
    return seen[:, :width]


def tree_attention_mask(
    visibility: Tensor,
    depths: Tensor,
    prefix_lens: Tensor,
    prefix_capacity: int,
    *,
    window: int | None = None,
) -> Tensor:
    """Mask over ``[prefix slots | tree nodes]`` for one verify forward.

    Args:
        visibility: bool [B, N, N] from `ancestor_visibility`.
        depths: int64 [B, N]; the root has depth 0.
        prefix_lens: int64 [B], committed tokens before the root (the root itself not counted).
        prefix_capacity: number of prefix key slots in the result, at least ``max(prefix_lens)``.
        window: sliding window in tokens: a query at position p sees positions greater than
            ``p - window``. Positions count *depth*, so two nodes of one depth are at the same
            distance from everything before them, whatever their indices.
    Returns:
        bool [B, N, prefix_capacity + N]; every row has at least one True (the node itself).
    """
    slots = torch.arange(prefix_capacity, device=depths.device)
    prefix = slots[None, None, :] < prefix_lens[:, None, None]
    prefix = prefix.expand(-1, depths.shape[1], -1)
    tree = visibility
    if window is not None:
        if window < 1:
            raise ValueError(f"window is {window}; a sliding window holds at least 1 token")
        positions = prefix_lens[:, None] + depths
        prefix = prefix & (slots[None, None, :] > positions[:, :, None] - window)
        tree = tree & (depths[:, :, None] - depths[:, None, :] < window)
    return torch.cat([prefix, tree], dim=-1)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean mask into bytes, first column in the lowest bit (numpy's ``little``).

    Args:
        mask: bool [..., N].
    Returns:
        uint8 [..., ceil(N / 8)]; the bits past N are 0.
    """
    columns = mask.shape[-1]
    padded = torch.nn.functional.pad(mask, (0, -columns % 8))
    weights = 2 ** torch.arange(8, device=mask.device)
    bytes_ = (padded.unflatten(-1, (-1, 8)) * weights).sum(-1)
    return bytes_.to(torch.uint8)


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Invert `pack_bits`: uint8 [..., ceil(columns / 8)] to bool [..., columns]."""
    shifts = torch.arange(8, device=packed.device)
    bits = (packed[..., None].to(torch.int64) >> shifts) & 1
    return bits.flatten(-2)[..., :columns].bool()
