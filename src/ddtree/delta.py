"""Recurrent layers over trees: nodes that start from their parents' states.

A layer of this kind keeps one matrix per head. Under the gated delta rule a token decays it, erases
what it held under the token's key and writes the token's value there:

    S  <-  S diag(exp(g));      S  <-  S + beta (v - S k) k^T;      output  =  S q

with one g per head (gated DeltaNet; Yang et al. 2024, arXiv 2412.06464, give the chunked form of a
chain) or one per key channel (Kimi Delta Attention; arXiv 2510.26692). Mamba2's rule erases
nothing, S <- exp(g) S + v k^T (Dao and Gu 2024, arXiv 2405.21060).

A state cannot be masked as attention can, but what the tokens of a tree add to it can. Unrolled
along the path from the root to a node n, with G the sum of g along a path and D_ij =
diag(exp(G_i - G_j)),

    S_n  =  S_0 diag(exp(G_n))  +  sum over j on the path of  u_j k_j^T D_nj
    u_i  =  beta_i (v_i - S_0 diag(exp(G_i)) k_i - sum over ancestors j of (k_j^T D_ij k_i) u_j)

and with ancestors before their descendants the second line is one triangular system for all nodes;
in Mamba2's rule u is v. So a tree is verified in one batched pass without a state per node:
`TreeUpdate` keeps the vectors per node and head from which the state of the accepted node is made.
A chain is the tree of one path, and a decoded token the tree of one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class TreeUpdate:
    """What N nodes add to a layer's states.

    Attributes:
        keys: float32 [B, H, N, K].
        writes: float32 [B, H, N, V], the vectors u.
        decays: float64 [B, H, N, K or 1], the sums G: differences of large ones must stay exact.
        visibility: bool [B, N, N], ancestor or self.
    """

    keys: Tensor
    writes: Tensor
    decays: Tensor
    visibility: Tensor

    def states_after(self, nodes: Tensor, states: Tensor) -> Tensor:
        """States [R, H, V, K] after one node per row.

        Args:
            nodes: int64 [R, 2]: row of the batch and node.
            states: [R, H, V, K], the states before the root.
        """
        rows, ends = nodes.unbind(1)
        decays = self.decays[rows]
        heads, gates = decays.shape[1], decays.shape[3]
        reached = decays.gather(2, ends[:, None, None, None].expand(-1, heads, 1, gates))
        seen = self.visibility[rows, ends][:, None, :, None]
        weights = (reached - decays).masked_fill(~seen, float("-inf")).exp().float()
        added = self.writes[rows].transpose(2, 3) @ (weights * self.keys[rows])
        return reached.exp().float() * states + added


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Tensor,
    betas: Tensor,
    states: Tensor,
    visibility: Tensor,
) -> tuple[Tensor, TreeUpdate]:
    """Outputs of all nodes of B trees, and what they add to the states.

    Args:
        queries, keys: float32 [B, H, N, K]; queries scaled.
        values: float32 [B, H, N, V].
        gates: float32 [B, H, N, 1], or [B, H, N, K] for a decay per channel of the keys; the
            decays' logarithms, at most 0.
        betas: float32 [B, H, N].
        states: float32 [B, H, V, K] before the roots.
        visibility: bool [B or 1, N, N], ancestor or self; a parent comes before its children.
    Returns:
        Outputs float32 [B, H, N, V], and the update.
    """
    decays = _sums(gates, visibility)
    between = _between(decays, visibility)
    start = decays.exp().float()
    wanted = values - (start * keys) @ states.transpose(2, 3)
    writes = torch.linalg.solve_triangular(
        betas[..., None] * _products(keys, keys, between),
        betas[..., None] * wanted,
        upper=False,
        unitriangular=True,
    )
    outputs = (start * queries) @ states.transpose(2, 3)
    outputs = outputs + _products(queries, keys, between) @ writes
    return outputs, TreeUpdate(keys, writes, decays, visibility.expand(len(keys), -1, -1))


def additive_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Tensor,
    states: Tensor,
    visibility: Tensor,
) -> tuple[Tensor, TreeUpdate]:
    """`delta_rule` for layers that write without erasing (Mamba2)."""
    decays = _sums(gates, visibility)
    outputs = (decays.exp().float() * queries) @ states.transpose(2, 3)
    outputs = outputs + _products(queries, keys, _between(decays, visibility)) @ values
    return outputs, TreeUpdate(keys, values, decays, visibility.expand(len(keys), -1, -1))


def _sums(gates: Tensor, visibility: Tensor) -> Tensor:
    """Sums along paths, float64 as `gates` [B, H, N, G]."""
    return visibility[:, None].double() @ gates.double()


def _between(decays: Tensor, visibility: Tensor) -> Tensor:
    """exp(G_i - G_j) for j on the path to i, else 0: float32 [B, H, N, N, G]."""
    between = decays[..., :, None, :] - decays[..., None, :, :]
    return between.masked_fill(~visibility[:, None, :, :, None], float("-inf")).exp().float()


def _products(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """Decayed inner products of every node's `left` with `right` along its path: [B, H, N, N]."""
    if between.shape[-1] == 1:
        return between[..., 0] * (left @ right.transpose(2, 3))
    return torch.einsum("bhik,bhjk,bhijk->bhij", left, right, between)


def node_bytes(
    heads: int, key_size: int, value_size: int, gates: int, channels: int, itemsize: int
) -> int:
    """What a verified node leaves behind in one layer: its part of `TreeUpdate` with `gates` decays
    per head, and its inputs of the convolution of `channels` columns of `itemsize` bytes."""
    return heads * (4 * (key_size + value_size) + 8 * gates) + channels * itemsize


def chain_visibility(nodes: int, device: torch.device) -> Tensor:
    """bool [1, N, N] of a chain: every node sees those before it and itself."""
    return torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()


def chain_parents(batch: int, nodes: int, device: torch.device) -> Tensor:
    """int64 [B, N] of a chain, -1 for its root."""
    return torch.arange(-1, nodes - 1, device=device).expand(batch, -1)


def window_places(parents: Tensor, taps: int) -> Tensor:
    """Which inputs a causal convolution over a path reads at each node.

    Args:
        parents: int64 [B, N], -1 for roots.
        taps: length of the convolution.
    Returns:
        int64 [B, N, taps], oldest first: places in the `taps - 1` inputs before the roots with the
        nodes' inputs behind them.
    """
    held = taps - 1
    before = torch.arange(-1, held - 1, device=parents.device).clamp(min=0)
    up = torch.where(parents < 0, held - 1, parents + held)
    up = torch.cat([before.expand(len(parents), -1), up], dim=1)
    places = [torch.arange(held, held + parents.shape[1], device=parents.device).expand_as(parents)]
    for _ in range(held):
        places.append(up.gather(1, places[-1]))
    return torch.stack(places[::-1], dim=2)


def convolve_paths(
    inputs: Tensor, held: Tensor, weights: Tensor, bias: Tensor | None, places: Tensor
) -> tuple[Tensor, Tensor]:
    """A depthwise convolution and SiLU along every node's path.

    Args:
        inputs: [B, N, C].
        held: [B, C, taps - 1], the inputs before the roots, oldest first.
        weights: [C, taps].
        places: `window_places` [B, N, taps].
    Returns:
        Outputs float32 [B, N, C]; all inputs [B, taps - 1 + N, C], which `places` index.
    """
    row = torch.cat([held.transpose(1, 2).to(inputs.dtype), inputs], dim=1)
    total = inputs.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    for tap in range(places.shape[2]):
        total = total + _pick(row, places[:, :, tap]).float() * weights[:, tap].float()
    return silu(total), row


def _pick(row: Tensor, places: Tensor) -> Tensor:
    """Entries [B, M, C] of `row` [B, L, C] at `places` [B, M]."""
    return row.gather(1, places[:, :, None].expand(-1, -1, row.shape[2]))


def held_inputs(row: Tensor, places: Tensor) -> Tensor:
    """The last inputs of one node's path, as `convolve_paths` takes them: [B, C, taps - 1].

    Args:
        row: [B, L, C], from `convolve_paths`.
        places: int64 [B, taps], one node's window.
    """
    return _pick(row, places[:, 1:]).transpose(1, 2)
