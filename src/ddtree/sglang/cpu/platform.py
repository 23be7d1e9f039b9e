"""The platform class SGLang instantiates, and the few CPU seams that have no platform hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import (
    add_attention_backend_choices,
    add_draft_attention_backend_choices,
)
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch.profiler import ProfilerActivity

from ddtree.sglang.cpu import ATTENTION_BACKEND, PLATFORM_NAME
from ddtree.sglang.draft_model import keep_embedding_dtype

_SPECULATIVE_ALGORITHMS = frozenset({"DFLASH", "DDTREE"})


class DDTreeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on a CPU with PyTorch operators only: no Triton, no graphs, no `sgl-kernel`."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        add_attention_backend_choices([ATTENTION_BACKEND])
        add_draft_attention_backend_choices([ATTENTION_BACKEND])
        register_resolution_hook("handle_model_specific_adjustments")(_admit_attention_sinks)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Take this platform's backend where the user named none.

        By now SGLang has already resolved the unset field to its own CPU engine's backend, so the
        question is what the user typed.
        """
        if server_args._raw_input.get("attention_backend") is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.moe_runner_backend == "auto":
            # Of all runners' weight layouts, the one that SGLang's torch experts read.
            server_args.moe_runner_backend = "triton"

    def get_device(self, device_id: int = 0) -> str:
        """The value of `--device` when the user gives none; every rank shares the one CPU."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in _SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in _SPECULATIVE_ALGORITHMS and backend == ATTENTION_BACKEND

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Snapshots of recurrent states for the radix cache."""
        return True

    def get_speculative_cache_locs_fn(self) -> Any:
        from ddtree.sglang.cpu.operators import extend_cache_locs

        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        from ddtree.sglang.cpu.operators import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool if kind == "mha" else None

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """The activity that `/start_profile` records; without it the request ends the server."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Runs once in each worker process, before any model is built."""
        from ddtree.sglang.cpu.operators import install_torch_operators

        install_torch_operators()

    def post_load_model(self, model: Any) -> None:
        """Pack the weights; adapt a DFlash draft model: no Triton rotary kernel, its own dtype.

        The operators of recurrent layers are installed here, before their pools and backends are
        made: their modules import the one that calls `init_backend`.
        """
        from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
        from sglang.srt.models.kimi_linear import KimiMoE

        from ddtree.sglang.cpu.packed import pack_model

        pack_model(model)
        if any(isinstance(m, RadixLinearAttention | MambaMixer2) for m in model.modules()):
            from ddtree.sglang.cpu.recurrent import install_recurrent_operators

            install_recurrent_operators(model.get_input_embeddings().weight.dtype)
        for module in model.modules():
            if isinstance(module, KimiMoE):
                # It leaves its factor to the experts, and torch experts leave it to their caller.
                module.topk.topk_config.apply_routed_scaling_factor_on_output = True
        from sglang.srt.models.dflash import DFlashDraftModel

        if not isinstance(model, DFlashDraftModel):
            return
        for layer in model.layers:
            layer.self_attn.use_table_qk_norm_rope = False
        keep_embedding_dtype(model)


def _admit_attention_sinks(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Take part as a backend with attention sinks in SGLang's check of a model's arguments.

    SGLang lists such backends by name; on a CPU it knows its own engine's, whose part is ours here.
    """
    # Not at the top: these modules ask for the platform that this one defines.
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    view = resolving_view(server_args)
    architectures = model_config_of(server_args).hf_config.architectures or ()
    if view.attention_backend != ATTENTION_BACKEND or "GptOssForCausalLM" not in architectures:
        previous(server_args)
        return
    declare_resolution(server_args, PLATFORM_NAME, attention_backend="intel_amx")
    previous(server_args)
    declare_resolution(server_args, PLATFORM_NAME, attention_backend=ATTENTION_BACKEND)
