"""The DFlash draft model: one block-diffusion pass over ``[root, MASK, ..., MASK]``.

Every layer attends to the target's features of the committed context (projected once to K/V
and kept) and to the block itself. Inference and training share the layers; they differ only in
where a layer's keys come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.drafter.config import DFlashConfig, DrafterError

Rotation = tuple[Tensor, Tensor]
# (queries [..., L, Hq, D], keys and values [..., L, Hkv, D]) -> [..., L, Hq * D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ContextCache:
    """Keys and values of the committed context, preallocated for every layer.

    Attributes:
        keys, values: per layer [B, Hkv, capacity, D].
        length: committed positions; what lies beyond is scratch for the block.
    """

    def __init__(self, config: DFlashConfig, batch: int, capacity: int, like: Tensor) -> None:
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.capacity = capacity
        self.length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Place [B, L, Hkv, D] after the committed part; return views of all keys and values.

        The committed length does not move. Views are [B, Hkv, length + L, D].
        """
        end = self.length + keys.shape[1]
        if end > self.capacity:
            raise DrafterError(
                f"{end} positions exceed the context cache's capacity of {self.capacity}; "
                "make it larger"
            )
        self.keys[layer][:, :, self.length : end] = keys.transpose(1, 2)
        self.values[layer][:, :, self.length : end] = values.transpose(1, 2)
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


@dataclass(frozen=True)
class PackedContext:
    """Target features of several documents, back to back, for training.

    Attributes:
        features: [N, K * H] target features of all documents' context tokens.
        lengths: context tokens of each document; sums to N.
        anchors: int64 [A] position, within its document, of each block's root; blocks of one
            document lie together and follow the order of the documents.
        blocks: number of blocks of each document; sums to A.
    """

    features: Tensor
    lengths: list[int]
    anchors: Tensor
    blocks: list[int]
    positions: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.features.device
        positions = [torch.arange(n, device=device) for n in self.lengths]
        object.__setattr__(self, "positions", torch.cat(positions))


class DraftAttention(nn.Module):
    """Grouped-query attention with normalised queries and keys (Qwen3's layout)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        query, shared = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, shared, bias=bias)
        self.v_proj = nn.Linear(hidden, shared, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def project_kv(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., L, Hkv, D] of [..., L, H]."""
        keys = self.k_norm(self._split(self.k_proj(hidden)))
        return rotate(keys, rotation), self._split(self.v_proj(hidden))

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        queries = rotate(self.q_norm(self._split(self.q_proj(hidden))), rotation)
        return self.o_proj(attend(queries, *self.project_kv(hidden, rotation)))

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DraftLayer(nn.Module):
    """One decoder layer; `attend` decides which keys its queries see."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDraftModel(nn.Module):
    """DFlash drafter without embedding and head, which belong to the target.

    Weight names are those of z-lab's checkpoints.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Not a buffer: casting the model to bf16 must not round the frequencies.
        self._frequencies, self._rope_scale = rope_frequencies(config)

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The decoder layers, typed."""
        return cast(list[DraftLayer], list(self.layers))

    def new_cache(self, batch: int, capacity: int) -> ContextCache:
        """An empty cache for `capacity` positions, the block's own slots included."""
        return ContextCache(self.config, batch, capacity, like=self.fc.weight.detach())

    def extend_context(self, cache: ContextCache, features: Tensor, positions: Tensor) -> None:
        """Commit T more context tokens to the cache, in place.

        Args:
            features: [B, T, K * H] target hidden states of those tokens.
            positions: int64 [B, T] or [T].
        """
        context = self.hidden_norm(self.fc(features))
        rotation = self._rotation(positions, context.dtype)
        for index, layer in enumerate(self.draft_layers):
            cache.write(index, *layer.self_attn.project_kv(context, rotation))
        cache.length += features.shape[1]

    def draft(self, cache: ContextCache, block: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B, b, H] of a block given by its embeddings [B, b, H].

        Args:
            positions: int64 [B, b] or [b] of the block's slots, root first.
        """
        rotation = self._rotation(positions, block.dtype)
        hidden = block
        for index, layer in enumerate(self.draft_layers):
            hidden = layer(hidden, rotation, self._cached_attention(index, cache, block.shape[1]))
        return self.norm(hidden)

    def forward(self, context: PackedContext, blocks: Tensor) -> Tensor:
        """Hidden states [A, b, H] of training blocks given by their embeddings [A, b, H].

        A block sees its own document's context strictly before its anchor, and itself.
        """
        size = blocks.shape[1]
        offsets = torch.arange(size, device=blocks.device)
        rotation = self._rotation(context.anchors[:, None] + offsets, blocks.dtype)
        projected = self.hidden_norm(self.fc(context.features))
        context_rotation = self._rotation(context.positions, blocks.dtype)
        hidden = blocks
        for index, layer in enumerate(self.draft_layers):
            keys, values = layer.self_attn.project_kv(projected, context_rotation)
            hidden = layer(hidden, rotation, self._packed_attention(index, context, keys, values))
        return self.norm(hidden)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[..., None, :]
        scale = self._rope_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _limits(self, layer: int) -> tuple[bool, int | None]:
        sliding = self.config.layer_types[layer] == "sliding_attention"
        causal = sliding if self.config.is_causal is None else self.config.is_causal
        return causal, self.config.sliding_window if sliding else None

    def _cached_attention(self, layer: int, cache: ContextCache, size: int) -> Attend:
        causal, window = self._limits(layer)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = cache.write(layer, keys, values)
            shared = all_keys.shape[1]
            mask = None
            if causal or window is not None:
                mask = block_visibility(size, cache.length, causal, window, keys.device)
                mask = mask.repeat_interleave(queries.shape[-2] // shared, dim=0)
            folded = fold_queries(queries, shared)
            out = F.scaled_dot_product_attention(folded, all_keys, all_values, attn_mask=mask)
            return unfold_queries(out, size)

        return attend

    def _packed_attention(
        self, layer: int, context: PackedContext, context_keys: Tensor, context_values: Tensor
    ) -> Attend:
        causal, window = self._limits(layer)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # One document at a time: attention across documents cannot even be expressed.
            blocks, lengths = context.blocks, context.lengths
            parts = zip(
                *(t.split(blocks) for t in (queries, keys, values, context.anchors)),
                *(t.split(lengths) for t in (context_keys, context_values)),
                strict=True,
            )
            return torch.cat(
                [
                    document_attention(q, k, v, anchors, far_k, far_v, causal, window)
                    for q, k, v, anchors, far_k, far_v in parts
                ]
            )

        return attend


def document_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    anchors: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attention of one document's blocks: context before the anchor, and the own block.

    A query always sees its own slot, so no row is without a key and no NaN can arise.

    Args:
        queries: [A, b, Hq, D]; keys, values: [A, b, Hkv, D] of the blocks.
        anchors: int64 [A] root positions; context_keys, context_values: [T, Hkv, D].
    Returns:
        [A, b, Hq * D].
    """
    count, size, _, dim = queries.shape
    length, shared, _ = context_keys.shape
    folded = fold_queries(queries, shared) * dim**-0.5  # [A, Hkv, b * G, D]
    rows = folded.shape[2]
    long = folded.transpose(0, 1).reshape(shared, count * rows, dim)
    far = long @ context_keys.permute(1, 2, 0)
    near = folded @ keys.permute(0, 2, 3, 1)  # [A, Hkv, b * G, b]
    far = far.view(shared, count, rows, length)
    far = far + _context_bias(anchors, length, size, window, rows // size, far.dtype)
    if causal or window is not None:
        visible = block_visibility(size, 0, causal, window, near.device)
        near = near.masked_fill(~visible.repeat_interleave(rows // size, 0), float("-inf"))
    weights = torch.cat((far, near.transpose(0, 1)), dim=-1).softmax(dim=-1)
    far, near = weights.split((length, size), dim=-1)
    out = far.reshape(shared, count * rows, length) @ context_values.transpose(0, 1)
    out = out.view(shared, count, rows, dim).transpose(0, 1)
    out = out + near.transpose(0, 1) @ values.transpose(1, 2)
    return unfold_queries(out, size)


def _context_bias(
    anchors: Tensor, length: int, size: int, window: int | None, groups: int, dtype: torch.dtype
) -> Tensor:
    """0 where a query may see a context token, -inf elsewhere: [A, 1 or b * G, T]."""
    positions = torch.arange(length, device=anchors.device)
    hidden = positions >= anchors[:, None, None]
    if window is not None:
        slots = anchors[:, None] + torch.arange(size, device=anchors.device)
        beyond = slots[..., None] - positions >= window
        hidden = hidden | beyond.repeat_interleave(groups, dim=1)
    return torch.zeros(hidden.shape, dtype=dtype, device=anchors.device).masked_fill_(
        hidden, float("-inf")
    )


def block_visibility(
    size: int, context: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """bool [size, context + size]: what each slot of a block sees, with limits by position."""
    slots = context + torch.arange(size, device=device)[:, None]
    positions = torch.arange(context + size, device=device)
    visible = torch.ones(size, context + size, dtype=torch.bool, device=device)
    if causal:
        visible &= positions <= slots
    if window is not None:
        visible &= (slots - positions).abs() < window
    return visible


def fold_queries(queries: Tensor, shared: int) -> Tensor:
    """[B, L, Hq, D] -> [B, Hkv, L * G, D]: the heads that share keys become more queries.

    Keys and values stay un-expanded, which is both less memory and one larger product.
    """
    batch, size, heads, dim = queries.shape
    grouped = queries.view(batch, size, shared, heads // shared, dim)
    return grouped.transpose(1, 2).reshape(batch, shared, -1, dim)


def unfold_queries(out: Tensor, size: int) -> Tensor:
    """[B, Hkv, L * G, D] -> [B, L, Hq * D], the inverse of `fold_queries`."""
    return out.unflatten(2, (size, -1)).transpose(1, 2).flatten(2)


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding (half-split layout) of [..., L, heads, D]."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def rope_frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin (1 but for YaRN)."""
    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
        return config.rope_theta ** -(steps / config.head_dim), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    return frequencies, float(scale)
