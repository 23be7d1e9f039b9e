"""PyTorch versions of the Triton helpers that SGLang offers no platform hook for."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

import torch
from sglang.kernels.ops.elementwise import elementwise
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative import domino_utils

from ddtree.sglang.compat import replace_everywhere


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """The in-tree K/V pool with rows moved by indexing instead of a Triton byte copy."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        # An accepted path mostly lies where it belongs; a CPU tensor may be asked which does not.
        moved = (tgt_loc != src_loc).nonzero().flatten()
        if not len(moved):
            return
        targets, sources = tgt_loc[moved], src_loc[moved]
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer.index_copy_(0, targets, buffer.index_select(0, sources))


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write consecutive pieces of `out_cache_loc` to columns [start, end) of each request's row."""
    starts, ends = start_offset[:batch_size].tolist(), end_offset[:batch_size].tolist()
    rows = req_pool_indices[:batch_size].tolist()
    taken = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """K/V slots of `draft_token_num` tokens from `start_offset` on, int64 [batch * tokens]."""
    columns = start_offset[:batch_size, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices[:batch_size, None], columns].flatten().to(torch.int64)


def gpt_oss_swiglu(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """gpt-oss's activation of interleaved gate and up columns [..., 2 * I] -> [..., I].

    SGLang's own is compiled by inductor, which takes minutes on a CPU.
    """
    gate = x[..., ::2].clamp(max=gemm1_limit)
    up = x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * torch.sigmoid(gemm1_alpha * gate) * (up + 1)


def add_gated_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the shared expert's output [T, H] to that of the routed ones, scaled by its gate [H]."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices [..., k] for DFlash2's selector; FlashInfer's read CUDA tensors alone."""
    return torch.topk(scores, k, dim=-1)


def admit_domino_runtime(**_checked: Any) -> None:
    """Domino's parts on a CPU in any precision; SGLang admits its own rollout on CUDA in bf16.

    The shapes it checks besides are the checkpoint's, which the loader has checked.
    """


def install_torch_operators() -> None:
    """Replace, in this process, the Triton launchers that a CPU server would otherwise reach."""
    replace_everywhere(allocation.assign_req_to_token_pool_func, assign_req_to_token_pool)
    replace_everywhere(allocation.get_last_loc, allocation.get_last_loc_torch)
    # The expert layer that calls it is imported first, so that its name is rebound too.
    import_module("sglang.srt.layers.moe.fused_moe_native")
    replace_everywhere(fused_moe.swiglu_gpt_oss_sigmoid_alpha, gpt_oss_swiglu)
    replace_everywhere(elementwise.fused_gate_sigmoid_mul_add, add_gated_shared_expert)
    replace_everywhere(import_module("sglang.srt.models.dflash")._radix_topk, top_k)
    replace_everywhere(domino_utils.validate_domino_runtime, admit_domino_runtime)
    _ignore_streams_of_cpu_tensors()
    _default_to_the_cpus_device_module()
    _pin_no_memory()
    _register_attention_backend()


def _ignore_streams_of_cpu_tensors() -> None:
    """`Tensor.record_stream` raises on a CPU tensor, where there is nothing to record."""
    record_stream = torch.Tensor.record_stream

    def record_stream_off_cpu(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.device.type != "cpu":
            record_stream(tensor, stream)

    torch.Tensor.record_stream = record_stream_off_cpu  # type: ignore[assignment,method-assign]


def _default_to_the_cpus_device_module() -> None:
    """Models ask `torch.get_device_module()` for their device; torch built for CUDA names that."""
    get_device_module = torch.get_device_module

    @wraps(get_device_module)  # Dynamo looks for what it wraps
    def cpus_device_module(device: torch.device | str | None = None) -> Any:
        return get_device_module("cpu" if device is None else device)

    torch.get_device_module = cpus_device_module  # type: ignore[assignment]


def _pin_no_memory() -> None:
    """`Tensor.pin_memory` asks a driver; without a device to copy to there is nothing to pin."""

    def unpinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        return tensor

    torch.Tensor.pin_memory = unpinned  # type: ignore[assignment,method-assign]


def _register_attention_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from ddtree.sglang.cpu import ATTENTION_BACKEND
    from ddtree.sglang.cpu.attention import SdpaAttnBackend

    register_attention_backend(ATTENTION_BACKEND)(SdpaAttnBackend)
    _attend_to_latents(ATTENTION_BACKEND)


def _attend_to_latents(backend: str) -> None:
    """Multi-head latent attention reads the cached latents in every forward, prefill included."""
    forward = import_module(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
    )
    handlers = import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handlers.AttentionBackendRegistry.register(
        backend, lambda _layer, _batch: forward.AttnForwardMethod.MLA
    )
