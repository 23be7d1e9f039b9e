"""SGLang attention backend on `scaled_dot_product_attention`.

One call per group of requests of equal shape, with the gather indices and the mask of a forward
computed once and shared by all layers. Key/value heads are never expanded. Serves prefill with a
cached prefix, decode, the DFlash draft block (bidirectional), and chain or tree verification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class RequestGroup:
    """Requests of one forward that share a query length and are attended to in one call.

    Keys of a request are its `prefix_lens` cached tokens followed by the `queries` tokens of this
    forward; the key axis is padded to the longest request and the padding masked.
    """

    rows: torch.Tensor | slice  # query tokens of the group, [B * Q]
    slots: torch.Tensor  # KV slots, int64 [B, K]
    prefix_lens: torch.Tensor  # int64 [B]
    query_positions: torch.Tensor  # int64 [B, Q]
    tree: torch.Tensor | None = None  # ancestor visibility, bool [B, Q, Q]
    window_slots: torch.Tensor | None = None  # slots in a sliding-window sub-pool, int64 [B, K]
    masks: dict[tuple[bool, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def ragged(self) -> bool:
        """Whether some request has fewer keys than the key axis is long."""
        keys = self.prefix_lens + self.query_positions.shape[1]
        return bool((keys != self.slots.shape[1]).any())

    def mask(self, *, bidirectional: bool, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, Q, K], or None when every query sees every key."""
        key = (bidirectional, window)
        if key not in self.masks:
            self.masks[key] = self._build_mask(bidirectional, window, dtype)
        return self.masks[key]

    def _build_mask(
        self, bidirectional: bool, window: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        queries = self.query_positions.shape[1]
        if window < 0 and not self.ragged and (bidirectional or queries == 1):
            return None
        columns = torch.arange(self.slots.shape[1])
        offsets = columns - self.prefix_lens[:, None]  # [B, K], negative in the prefix
        inside = offsets.clamp(0, queries - 1)
        visible = self._visible_in_window(bidirectional, inside) & (offsets < queries)[:, None, :]
        visible |= (offsets < 0)[:, None, :]
        if window >= 0:
            key_positions = torch.where(
                offsets < 0, columns, self.query_positions.gather(1, inside)
            )
            visible &= self.query_positions[:, :, None] - key_positions[:, None, :] <= window
        mask = torch.zeros(visible.shape, dtype=dtype)
        return mask.masked_fill_(~visible, float("-inf"))[:, None]

    def _visible_in_window(self, bidirectional: bool, inside: torch.Tensor) -> torch.Tensor:
        """Visibility of this forward's own tokens, spread to the key axis: bool [B, Q, K]."""
        batch, queries = self.query_positions.shape
        index = inside[:, None, :].expand(batch, queries, inside.shape[1])
        if bidirectional:
            return torch.ones_like(index, dtype=torch.bool)
        if self.tree is not None:
            return self.tree.gather(2, index)
        return index <= torch.arange(queries)[:, None]


def with_sinks(
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    queries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention sinks as one more key: its score is the head's sink and its value is zero.

    So a sink takes its share of every softmax and adds nothing, as in gpt-oss.

    Args:
        key, value: [B, kv heads, K, D].
        mask: additive [B, 1, Q, K], or None where every query sees every key.
        sinks: [heads], a score per query head.
    Returns:
        Keys and values of K + 1, and the mask [B, heads, Q, K + 1].
    """
    batch, _, keys, _ = key.shape
    if mask is None:
        mask = key.new_zeros(batch, 1, queries, keys)
    shape = (batch, len(sinks), queries, 1)
    column = sinks.to(mask.dtype)[:, None, None].expand(shape)
    mask = torch.cat([mask.expand(-1, len(sinks), -1, -1), column], dim=-1)
    return pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1)), mask


class SdpaAttnBackend(AttentionBackend):
    """Attention backend `ddtree_sdpa` of the `ddtree-cpu` platform."""

    # A verify input's `visibility` is enough; no flat mask need be built.
    reads_tree_visibility = True

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_window_pool = (
            isinstance(self.token_to_kv_pool, SWAKVPool)
            and self.token_to_kv_pool.swa_layer_nums > 0
        )
        self.window_cache_loc: torch.Tensor | None = None
        self.groups: list[RequestGroup] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one forward: its request groups and where it writes in a window sub-pool."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.groups = []
            return
        if mode.is_decode():
            self.groups = [self._uniform_group(forward_batch, forward_batch.seq_lens - 1, 1)]
        elif mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            self.groups = [self._uniform_group(forward_batch, forward_batch.seq_lens, width)]
        else:
            self.groups = self._extend_groups(forward_batch)
        self.window_cache_loc = None
        if self.has_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self.window_cache_loc = translate(forward_batch.out_cache_loc)
            for group in self.groups:
                group.window_slots = translate(group.slots)

    def _uniform_group(
        self, forward_batch: ForwardBatch, prefix_lens: torch.Tensor, queries: int
    ) -> RequestGroup:
        """All requests of a decode or verify forward, which bring `queries` tokens each."""
        prefix_lens = prefix_lens.to(torch.int64)
        batch = prefix_lens.shape[0]
        keys = int(prefix_lens.max()) + queries
        spec_info = forward_batch.spec_info
        return RequestGroup(
            rows=slice(0, batch * queries),
            slots=self.req_to_token[forward_batch.req_pool_indices, :keys].to(torch.int64),
            prefix_lens=prefix_lens,
            query_positions=forward_batch.positions[: batch * queries].view(batch, queries),
            tree=None if spec_info is None else getattr(spec_info, "visibility", None),
        )

    def _extend_groups(self, forward_batch: ForwardBatch) -> list[RequestGroup]:
        """Prefill requests, those with the same prefix and extend length together."""
        prefixes = forward_batch.extend_prefix_lens.tolist()
        extends = forward_batch.extend_seq_lens.tolist()
        members: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(zip(prefixes, extends, strict=True)):
            members.setdefault(shape, []).append(index)
        first_rows = torch.tensor([0, *extends]).cumsum(0)
        groups = []
        for (prefix, extend), indices in members.items():
            rows = (first_rows[indices][:, None] + torch.arange(extend)).flatten()
            requests = forward_batch.req_pool_indices[indices]
            groups.append(
                RequestGroup(
                    rows=rows,
                    slots=self.req_to_token[requests, : prefix + extend].to(torch.int64),
                    prefix_lens=torch.full((len(indices),), prefix),
                    query_positions=torch.arange(prefix, prefix + extend).expand(len(indices), -1),
                )
            )
        return groups

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend `q` [tokens, heads * head_dim] to the cache; returns the same layout."""
        self._reject_unsupported(layer)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.window_cache_loc), k, v
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for group in self.groups:
            output[group.rows] = self._attend(query[group.rows], layer, group, kwargs.get("sinks"))
        return output.flatten(1)

    forward_decode = forward_extend

    def _attend(
        self,
        query: torch.Tensor,
        layer: RadixAttention,
        group: RequestGroup,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One group: query [B * Q, heads, head_dim] -> [B * Q, heads, v_head_dim]."""
        batch, queries = group.query_positions.shape
        slots = group.slots
        if group.window_slots is not None and self._is_window_layer(layer):
            slots = group.window_slots
        key, value = (
            buffer.index_select(0, slots.flatten())
            .view(batch, slots.shape[1], *buffer.shape[1:])
            .transpose(1, 2)
            .to(query.dtype)
            for buffer in (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            )
        )
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
        # A prompt without a cached prefix needs no mask tensor, only the causal flag.
        whole = slots.shape[1] == queries and window < 0 and group.tree is None and queries > 1
        causal = whole and sinks is None
        mask = None
        if not (causal and not bidirectional):
            mask = group.mask(bidirectional=bidirectional, window=window, dtype=query.dtype)
        if sinks is not None:
            key, value, mask = with_sinks(key, value, mask, sinks, queries)
        out = scaled_dot_product_attention(
            query.view(batch, queries, *query.shape[1:]).transpose(1, 2),
            key,
            value,
            attn_mask=mask,
            is_causal=causal and not bidirectional,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return out.transpose(1, 2).reshape(batch * queries, query.shape[1], -1)

    def _is_window_layer(self, layer: RadixAttention) -> bool:
        return layer.sliding_window_size is not None and layer.sliding_window_size > -1

    def _reject_unsupported(self, layer: RadixAttention) -> None:
        """Features the fused operator has no argument for must fail, not be ignored."""
        if layer.is_cross_attention:
            raise NotImplementedError(
                "ddtree_sdpa has no cross attention; serve encoder-decoder models on a GPU."
            )
        if layer.logit_cap:
            raise NotImplementedError(
                f"ddtree_sdpa has no logit soft cap (this model asks for {layer.logit_cap}); "
                "serve it on a GPU."
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
