"""Recurrent layers of hybrid targets in plain torch, over chains and trees.

Gated DeltaNet, Kimi Delta Attention and Mamba2. Takes the place of SGLang's Triton backends on the
CPU platform: prefill from a cached prefix with snapshots for the radix cache, decode, and chain or
tree verification. The mathematics is in `ddtree.delta`; a verify keeps what its nodes add to the
states, not a state per node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention import triton_gdn_fused_proj
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.mamba_utils import BaseLinearStateParams
from sglang.srt.environ import envs
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.runtime_context import get_schedule, get_spec
from torch.nn.functional import silu, softplus

from ddtree.delta import (
    TreeUpdate,
    additive_rule,
    chain_parents,
    chain_visibility,
    convolve_paths,
    delta_rule,
    held_inputs,
    window_places,
)
from ddtree.mask import ancestor_visibility
from ddtree.sglang.compat import replace_everywhere
from ddtree.sglang.launch import recurrent_node_bytes

if TYPE_CHECKING:
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)
_MIB = 1 << 20


@dataclass
class Paths:
    """Who follows whom in a forward of N tokens per request, shared by all layers."""

    visibility: torch.Tensor  # ancestor or self, bool [B or 1, N, N]
    places: torch.Tensor  # inputs of the convolution, int64 [B, N, taps]

    @classmethod
    def of(cls, parents: torch.Tensor, visibility: torch.Tensor, taps: int) -> Paths:
        return cls(visibility, window_places(parents, taps))

    @classmethod
    def chain(cls, batch: int, tokens: int, taps: int, device: torch.device) -> Paths:
        """One path per request."""
        parents = chain_parents(batch, tokens, device)
        return cls.of(parents, chain_visibility(tokens, device), taps)


@dataclass
class Pending:
    """A layer's verified nodes, until the walk has chosen among them."""

    update: TreeUpdate
    row: torch.Tensor  # inputs of the convolution with those before the root, [B, L, C]
    places: torch.Tensor  # which of them every node saw, int64 [B, N, taps]


@dataclass
class Piece:
    """Part of one request's prefill: tokens `start` to `end` of the forward, at most a chunk."""

    request: int
    start: int
    end: int
    snapshot: int | None = None  # slot that takes the state after this piece


class TorchRecurrentBackend(MambaAttnBackendBase):
    """Linear-attention backend of one kind of recurrent layer on a CPU.

    Subclasses take a layer's inputs from SGLang's call, tokens first: the convolution's input
    [T, C], then what the rule needs besides.
    """

    needs_cpu_seq_lens = False
    channels_last = False  # a slot holds the convolution's inputs as [taps - 1, C]

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        pool = self.req_to_token_pool.mamba_pool
        self.conv_states_shape = pool.mamba_cache.conv[0].shape
        self.taps = self.conv_states_shape[-2 if self.channels_last else -1] + 1
        self.pending: dict[int, Pending] = {}
        self.paths: Paths | None = None
        self.pieces: list[Piece] = []
        self.fresh: list[bool] = []  # per prefill request: nothing of it is cached
        if get_spec().speculative_num_draft_tokens is not None:
            config = mambaish_config(model_runner.model_config)
            _log_pending_bytes(config.mamba2_cache_params)

    def convolution(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights [C, taps] and bias."""
        raise NotImplementedError

    def scan(
        self,
        layer: Any,
        convolved: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        states: torch.Tensor,
        visibility: torch.Tensor,
    ) -> tuple[torch.Tensor, TreeUpdate]:
        """The layer's rule over B requests of N tokens.

        Args:
            convolved: float32 [B, N, C].
            inputs: the others, [B, N, ...].
            states: float32 [B, H, V, K], before these tokens.
        Returns:
            Outputs float32 [B, N, H, V], and what the tokens add.
        """
        raise NotImplementedError

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Slots of the requests, and the paths or prefill pieces of one forward."""
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self.pending.clear()
        if mode.is_idle():
            return
        if mode.is_target_verify():
            self.paths = self._verify_paths(forward_batch)
        elif mode.is_decode():
            self.paths = Paths.chain(forward_batch.batch_size, 1, self.taps, self.device)
        else:
            self.pieces = self._prefill_pieces(forward_batch)
            self.fresh = (forward_batch.extend_prefix_lens == 0).tolist()

    def _verify_paths(self, forward_batch: ForwardBatch) -> Paths:
        spec_info = forward_batch.spec_info
        parents = getattr(spec_info, "parents", None)
        if parents is None:
            width = spec_info.draft_token_num
            return Paths.chain(forward_batch.batch_size, width, self.taps, self.device)
        return Paths.of(parents, ancestor_visibility(parents), self.taps)

    def _prefill_pieces(self, forward_batch: ForwardBatch) -> list[Piece]:
        """Every request's tokens in chunks, with the radix cache's snapshot at a chunk's end."""
        lengths = forward_batch.extend_seq_lens.tolist()
        tracked, slots = [0] * len(lengths), [0] * len(lengths)
        aligned = forward_batch.mamba_track_aligned_lens()
        if aligned is not None:
            assert forward_batch.mamba_track_indices is not None
            tracked = (aligned * forward_batch.mamba_track_mask).tolist()
            slots = forward_batch.mamba_track_indices.tolist()
        pieces, first = [], 0
        for request, length in enumerate(lengths):
            cuts = {*range(0, length, self.mamba_chunk_size), tracked[request], length}
            for start, end in pairwise(sorted(cuts)):
                snapshot = slots[request] if end == tracked[request] else None
                pieces.append(Piece(request, first + start, first + end, snapshot))
            first += length
        return pieces

    def _states(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's inputs of the convolution [slots, C, taps - 1], and states [slots, H, V, K]."""
        layer_cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        conv = layer_cache.conv[0]
        return conv.transpose(1, 2) if self.channels_last else conv, layer_cache.temporal

    def _run(
        self,
        layer: Any,
        inputs: Sequence[torch.Tensor],
        held: torch.Tensor,
        states: torch.Tensor,
        paths: Paths,
    ) -> tuple[torch.Tensor, Pending]:
        """One layer over B requests of N tokens.

        Args:
            inputs: [B, N, ...].
            held, states: what the requests have before these tokens.
        Returns:
            Outputs [B, N, H, V], and what the tokens add.
        """
        mixed, *others = inputs
        convolved, row = convolve_paths(mixed, held, *self.convolution(layer), paths.places)
        convolved = convolved.to(row.dtype).float()
        outputs, update = self.scan(layer, convolved, others, states.float(), paths.visibility)
        return outputs.to(row.dtype), Pending(update, row, paths.places)

    def run_layer(
        self,
        layer: Any,
        layer_id: int,
        forward_batch: ForwardBatch,
        inputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Outputs [T, H, V]; a verify leaves the states, everything else updates them."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            return self._verify(layer, layer_id, inputs)
        if mode.is_decode():
            return self._decode(layer, layer_id, forward_batch, inputs)
        return self._prefill(layer, layer_id, inputs)

    def _decode(
        self,
        layer: Any,
        layer_id: int,
        forward_batch: ForwardBatch,
        inputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """One token per request."""
        assert self.paths is not None
        conv, temporal = self._states(layer_id)
        slots = self.forward_metadata.mamba_cache_indices.long()
        inputs = [part[:, None] for part in inputs]
        outputs, pending = self._run(layer, inputs, conv[slots], temporal[slots], self.paths)
        nodes = torch.zeros(len(slots), 2, dtype=torch.int64)
        nodes[:, 0] = torch.arange(len(slots))
        self._write(layer_id, pending, nodes, slots, slots)
        if forward_batch.mamba_track_mask is not None:
            track = self.forward_metadata.mamba_track_indices.long()
            tracked = (forward_batch.mamba_track_mask & (track >= 0)).nonzero().flatten()
            taken = track[tracked]
            conv[taken], temporal[taken] = conv[slots[tracked]], temporal[slots[tracked]]
        return outputs.flatten(0, 1)

    def _verify(self, layer: Any, layer_id: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.paths is not None
        batch = len(self.paths.places)
        conv, temporal = self._states(layer_id)
        slots = self.forward_metadata.mamba_cache_indices[:batch].long()
        inputs = [part.unflatten(0, (batch, -1)) for part in inputs]
        outputs, self.pending[layer_id] = self._run(
            layer, inputs, conv[slots], temporal[slots], self.paths
        )
        return outputs.flatten(0, 1)

    def _prefill(self, layer: Any, layer_id: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        conv, temporal = self._states(layer_id)
        slots = self.forward_metadata.mamba_cache_indices.tolist()
        outputs = []
        for index, fresh in enumerate(self.fresh):
            if fresh:  # the slot may hold what another request left
                conv[slots[index]] = 0
                temporal[slots[index]] = 0
        for piece in self.pieces:
            slot = slice(slots[piece.request], slots[piece.request] + 1)
            tokens = piece.end - piece.start
            paths = Paths.chain(1, tokens, self.taps, self.device)
            mine = [part[piece.start : piece.end][None] for part in inputs]
            out, pending = self._run(layer, mine, conv[slot], temporal[slot], paths)
            outputs.append(out[0])
            last = torch.tensor([[0, tokens - 1]])
            here = torch.tensor([slot.start])
            self._write(layer_id, pending, last, here, here)
            if piece.snapshot is not None:
                conv[piece.snapshot], temporal[piece.snapshot] = conv[here[0]], temporal[here[0]]
        return torch.cat(outputs)

    def commit(self, nodes: torch.Tensor, track: torch.Tensor | None, steps: Any) -> None:
        """After a walk: every request's states become those after its last accepted node.

        Args:
            nodes: int64 [B], node indices.
            track, steps: slots [B] for the radix cache's snapshots and the node [B] of each, -1
                for none (a slot is -1 where its request is already over).
        """
        rows = torch.arange(len(nodes))
        slots = self.forward_metadata.mamba_cache_indices[: len(nodes)].long()
        for layer_id, pending in self.pending.items():
            if track is not None:
                tracked = ((steps >= 0) & (track >= 0)).nonzero().flatten()
                at = torch.stack([tracked, steps[tracked]], dim=1)
                self._write(layer_id, pending, at, slots[tracked], track[tracked].long())
            self._write(layer_id, pending, torch.stack([rows, nodes], dim=1), slots, slots)
        self.pending.clear()

    def _write(
        self,
        layer_id: int,
        pending: Pending,
        nodes: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Write the states after `nodes` (row, node) [R, 2] that started from slots `sources`."""
        conv, temporal = self._states(layer_id)
        rows, ends = nodes.unbind(1)
        states = pending.update.states_after(nodes, temporal[sources].float())
        temporal[targets] = states.to(temporal.dtype)
        held = held_inputs(pending.row[rows], pending.places[rows, ends])
        conv[targets] = held.to(conv.dtype)


class _AttentionLikeBackend(TorchRecurrentBackend):
    """Layers that SGLang calls as it calls attention: queries, keys, values, and two gates."""

    def convolution(self, layer: RadixLinearAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
        return layer.conv_weights, layer.bias

    def scan(
        self,
        layer: RadixLinearAttention,
        convolved: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        states: torch.Tensor,
        visibility: torch.Tensor,
    ) -> tuple[torch.Tensor, TreeUpdate]:
        shapes = ((layer.num_q_heads, layer.head_q_dim), (layer.num_k_heads, layer.head_k_dim),
                  (layer.num_v_heads, layer.head_v_dim))  # fmt: skip
        parts = convolved.split([heads * size for heads, size in shapes], dim=-1)
        queries, keys, values = (
            part.unflatten(-1, shape).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        )
        shared = layer.num_v_heads // layer.num_k_heads
        a, b = (part.float() for part in inputs)
        outputs, update = delta_rule(
            _unit(queries).repeat_interleave(shared, dim=1) * layer.head_k_dim**-0.5,
            _unit(keys).repeat_interleave(shared, dim=1),
            values,
            self.gates(layer, a).transpose(1, 2),
            b.sigmoid().transpose(1, 2),
            states,
            visibility,
        )
        return outputs.transpose(1, 2), update

    def gates(self, layer: RadixLinearAttention, a: torch.Tensor) -> torch.Tensor:
        """Logarithms of the decays [B, N, H, 1 or K]."""
        raise NotImplementedError

    def forward_decode(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Outputs [1, T, H, V]."""
        tokens = len(mixed_qkv)
        gates = a.reshape(tokens, layer.num_v_heads, -1)
        inputs = (mixed_qkv, gates, b.reshape(tokens, layer.num_v_heads))
        return self.run_layer(layer, layer.layer_id, forward_batch, inputs)[None]

    forward_extend = forward_decode


class TorchGDNBackend(_AttentionLikeBackend):
    """Gated DeltaNet: a decay per head."""

    def gates(self, layer: RadixLinearAttention, a: torch.Tensor) -> torch.Tensor:
        rates, bias = layer.A_log.float().exp(), layer.dt_bias.float()
        return -rates[:, None] * softplus(a + bias[:, None])


class TorchKDABackend(_AttentionLikeBackend):
    """Kimi Delta Attention: a decay per channel of the keys."""

    channels_last = True

    def gates(self, layer: RadixLinearAttention, a: torch.Tensor) -> torch.Tensor:
        rates = layer.A_log.float().exp().view(-1, 1)
        raised = a + layer.dt_bias.float().view(layer.num_v_heads, -1)
        if layer.lower_bound is not None:
            return layer.lower_bound * (rates * raised).sigmoid()
        return -rates * softplus(raised)


class TorchMamba2Backend(TorchRecurrentBackend):
    """Mamba2: no erasing; the mixer's projections and norm are SGLang's own."""

    def forward(
        self,
        mixer: MambaMixer2,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: ForwardBatch,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """Outputs [T, hidden], also written to `output` if that is given."""
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        sizes = (mixer.intermediate_size, mixer.conv_dim, mixer.num_heads)
        gate, mixed, dt = projected.split([size // mixer.tp_size for size in sizes], dim=-1)
        scanned = self.run_layer(mixer, layer_id, forward_batch, (mixed, dt)).flatten(1)
        mixed_out, _ = mixer.out_proj(mixer.norm.forward_native(scanned, gate))
        if output is not None:
            output.copy_(mixed_out)
        return mixed_out

    def convolution(self, layer: MambaMixer2) -> tuple[torch.Tensor, torch.Tensor | None]:
        return layer.conv1d.weight.squeeze(1), layer.conv1d.bias

    def scan(
        self,
        layer: MambaMixer2,
        convolved: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        states: torch.Tensor,
        visibility: torch.Tensor,
    ) -> tuple[torch.Tensor, TreeUpdate]:
        heads, groups = layer.num_heads // layer.tp_size, layer.n_groups // layer.tp_size
        shared = groups * layer.ssm_state_size
        x, keys, queries = convolved.split((heads * layer.head_dim, shared, shared), dim=-1)
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        keys, queries = (
            part.unflatten(-1, (groups, -1)).transpose(1, 2).repeat_interleave(heads // groups, 1)
            for part in (keys, queries)
        )
        (dt,) = inputs
        steps = softplus(dt.float() + layer.dt_bias.float()).transpose(1, 2)[..., None]
        gates = steps * layer.A.float()[:, None, None]
        outputs, update = additive_rule(queries, keys, steps * x, gates, states, visibility)
        outputs = outputs + layer.D.float()[:, None, None] * x
        return outputs.transpose(1, 2), update


class TorchHybridBackend(HybridLinearAttnBackend):
    """SGLang's pair of backends; the commit after a verify is ours where the layers are."""

    reads_tree_visibility = True

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: Any,
        req_pool_indices: torch.Tensor | None = None,
    ) -> None:
        """Commit by node index; a chain's is its count less one."""
        self.linear_attn_backend.commit(
            last_correct_step_indices.long(), mamba_track_indices, mamba_steps_to_track
        )


class TorchMambaPool(MambaPool):
    """The in-tree pool of states, without a state for every draft token."""

    def __init__(self, *, speculative_num_draft_tokens: int | None = None, **kwargs: Any) -> None:
        super().__init__(speculative_num_draft_tokens=None, **kwargs)


def gated_norm(
    self: FusedRMSNormGated, x: torch.Tensor, g: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """`FusedRMSNormGated.forward`: RMS norm of `x` [T, D], times its weight, times act(`g`)."""
    gate = g.float().sigmoid() if self.activation == "sigmoid" else silu(g.float())
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
    return (normed * gate).to(x.dtype)


def split_interleaved(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3-Next's projections, key head by key head, taken apart.

    Args:
        mixed_qkvz: [T, ...], per key head q, k and its value heads' v and z.
        mixed_ba: [T, 2 * value heads], per key head its value heads' b and a.
    Returns:
        All q, k and v side by side [T, C]; z [T, value heads, head_v]; b and a [T, value heads].
    """
    shared = num_heads_v // num_heads_qk
    sizes = [head_qk, head_qk, shared * head_v, shared * head_v]
    *qkv, z = mixed_qkvz.unflatten(1, (num_heads_qk, -1)).split(sizes, dim=2)
    b, a = mixed_ba.unflatten(1, (num_heads_qk, -1)).split(shared, dim=2)
    mixed_qkv = torch.cat([part.flatten(1) for part in qkv], dim=1)
    return mixed_qkv, z.reshape(-1, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def split_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3.5's projections, which lie side by side; returns as `split_interleaved` does."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=1)
    b, a = mixed_ba.split(num_heads_v, dim=1)
    return mixed_qkv, z.unflatten(1, (num_heads_v, head_v)), b, a


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, by the kernels' own formula: x / sqrt(sum of squares + 1e-6)."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _log_pending_bytes(params: BaseLinearStateParams) -> None:
    per_node = recurrent_node_bytes(params, params.dtype.conv.itemsize)
    requests = get_schedule().max_running_requests
    width = get_spec().speculative_num_draft_tokens
    logger.info(
        "Recurrent layers keep %.1f KiB per tree node: %.1f MiB for %d requests of %d nodes (a "
        "state per node would take %.1f MiB).",
        per_node / 1024,
        per_node * requests * width / _MIB,
        requests,
        width,
        params.mamba_cache_per_req * requests * width / _MIB,
    )


def _price_pending_nodes() -> None:
    """Let SGLang set aside for a verify what its nodes keep, not a state for each of them."""
    price = KVCacheConfigurator._handle_max_mamba_cache

    def priced(self: KVCacheConfigurator, total_rest_memory: float) -> float:
        width = get_spec().speculative_num_draft_tokens
        if width is None:
            return price(self, total_rest_memory)
        params = self.mambaish_config.mamba2_cache_params
        pending = width * recurrent_node_bytes(params, params.dtype.conv.itemsize)
        states = -(-pending // params.mamba_cache_per_req)
        with get_spec().override(speculative_num_draft_tokens=states):
            return price(self, total_rest_memory)

    KVCacheConfigurator._handle_max_mamba_cache = priced


@cache
def install_recurrent_operators(dtype: torch.dtype) -> None:
    """Put these in the places of SGLang's Triton kernels, once in a process.

    Args:
        dtype: of the model; the convolution's inputs are kept in it, where SGLang's default of
            bfloat16 would round them.
    """
    if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        envs.SGLANG_MAMBA_CONV_DTYPE.set(str(dtype).removeprefix("torch."))
    gdn_backend.GDNAttnBackend = TorchGDNBackend
    kda_backend.KDAAttnBackend = TorchKDABackend
    # Models ask whether their backend is this class.
    replace_everywhere(hybrid_linear_attn_backend.Mamba2AttnBackend, TorchMamba2Backend)
    hybrid_linear_attn_backend.HybridLinearAttnBackend = TorchHybridBackend
    HybridReqToTokenPool.mamba_pool_cls = TorchMambaPool
    FusedRMSNormGated.forward = gated_norm
    replace_everywhere(triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat, split_interleaved)
    replace_everywhere(
        triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous, split_contiguous
    )
    _price_pending_nodes()
