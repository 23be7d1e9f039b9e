"""Arguments of a DDTREE launch: what is inferred from the drafter, and every refusal.

Each refusal is one sentence that names the value, the limit and the fix, raised before any weight
is loaded.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.mamba_utils import BaseLinearStateParams
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.runtime_context import get_parallel

from ddtree.delta import node_bytes
from ddtree.drafter.config import (
    CONFIG_FILE,
    DOMINO,
    PLAIN,
    SELECTOR,
    DFlashConfig,
    DrafterError,
    check_fits_target,
)
from ddtree.sglang.cpu import ATTENTION_BACKEND
from ddtree.sglang.settings import AUTO, Settings

logger = logging.getLogger(__name__)

# Verify masks of an irregular tree: read as a flat mask, or (on a CPU) as visibility.
TREE_BACKENDS = ("triton", "flashinfer", ATTENTION_BACKEND)
DEFAULT_WIDTH = 33
_DEFAULT_MAX_RUNNING_REQUESTS = 48
# Targets with recurrent layers that are served besides those with gated DeltaNet.
_RECURRENT_CONFIGS = (KimiLinearConfig, NemotronHConfig)


def resolve_arguments(server_args: Any, platform: SRTPlatform) -> None:
    """Complete `server_args` in place for a DDTREE launch.

    Raises:
        ValueError: the combination cannot be served.
    """
    settings = Settings.from_environment()
    _refuse_unsupported(server_args)
    drafter = _read_drafter(server_args)
    if drafter.kind != PLAIN:
        _refuse_plain_only(server_args, settings, drafter.kind)
    target = ModelConfig.from_server_args(server_args)
    _refuse_images(target)
    check_fits_target(drafter, target.hf_text_config, target.vocab_size)
    _resolve_widths(server_args, drafter, target)
    _resolve_backends(server_args, platform, target)
    if settings.budget == AUTO:
        _refuse_one_width_only(server_args)
    # DFLASH has neither steps nor a branching factor, but generic sizing reads both.
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS
    _check_recurrent(server_args, target)
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("DDTREE does not mix prefill chunks into decode rounds; turned off.")


def _refuse_unsupported(args: Any) -> None:
    """Features that DDTREE has not been made to work with."""
    refusals = {
        "pipeline parallelism (--pp-size above 1)": args.pp_size != 1,
        "context parallelism (--attn-cp-size above 1)": args.attn_cp_size != 1,
        # SGLang turns the old spelling, --enable-dp-attention, into this one.
        "DP attention (--attn-dp-size above 1)": args.attn_dp_size != 1,
        "prefill/decode disaggregation (--disaggregation-mode)": args.disaggregation_mode != "null",
        "LoRA (--enable-lora)": bool(args.enable_lora or args.lora_paths),
        "two-batch overlap (--enable-two-batch-overlap)": args.enable_two_batch_overlap,
        "a draft window (--speculative-draft-window-size)": args.speculative_draft_window_size
        is not None,
        "adaptive speculation (--speculative-adaptive)": args.speculative_adaptive,
        "rejection sampling (--speculative-use-rejection-sampling), which is biased on a tree "
        "whose nodes are not sampled": args.speculative_use_rejection_sampling,
        "block verification (--speculative-use-block-verification)": (
            args.speculative_use_block_verification
        ),
        "streaming sessions (--enable-streaming-session)": args.enable_streaming_session,
        "grammars that cannot step back (--grammar-backend outlines)": (
            args.grammar_backend == "outlines"
        ),
        "on-policy sampling (--rl-on-policy-target)": args.rl_on_policy_target is not None,
        "sampling masks under watermarks (--enable-watermark)": args.enable_watermark,
    }
    for feature, asked in refusals.items():
        if asked:
            raise ValueError(f"DDTREE does not support {feature}; leave it out.")
    if args.enable_custom_logit_processor and not args.disable_overlap_schedule:
        raise ValueError(
            "Custom logit processors (--enable-custom-logit-processor) may read the output so far, "
            "which the host does not know under overlap scheduling; add --disable-overlap-schedule."
        )
    if args.speculative_draft_model_path is None:
        raise ValueError(
            "DDTREE needs a DFlash drafter; name one with --speculative-draft-model-path."
        )


def _refuse_plain_only(args: Any, settings: Settings, kind: str) -> None:
    """What other drafters than plain DFlash are not served with."""
    if settings.chain_seed:
        raise ValueError(
            f"DDTREE_CHAIN_SEED=1 seeds a plain drafter's chain, and this is a {kind} drafter; "
            "set it to 0."
        )
    if settings.budget == AUTO:
        raise ValueError(
            f"DDTREE_BUDGET is 'auto', whose gain is calibrated on plain drafters, and this is a "
            f"{kind} drafter; set DDTREE_BUDGET=fixed."
        )
    if args.tp_size != 1:
        raise ValueError(
            f"DDTREE serves {kind} drafters on one device so far, and --tp-size is "
            f"{args.tp_size}; set it to 1."
        )


def _refuse_one_width_only(args: Any) -> None:
    """What cannot change the width from round to round."""
    if args.attention_backend != ATTENTION_BACKEND:
        raise ValueError(
            f"DDTREE_BUDGET is 'auto', and {args.attention_backend} verifies trees of the launch "
            f"width only; set DDTREE_BUDGET=fixed, or serve on {ATTENTION_BACKEND}."
        )
    if args.tp_size != 1:
        raise ValueError(
            f"DDTREE_BUDGET is 'auto' and --tp-size is {args.tp_size}, but every rank would choose "
            "its own width; set DDTREE_BUDGET=fixed, or --tp-size 1."
        )


def _read_drafter(args: Any) -> DFlashConfig:
    """The drafter's own description, from a folder or the hub."""
    from sglang.srt.utils.hf_transformers_utils import download_from_hf

    folder = download_from_hf(args.speculative_draft_model_path, allow_patterns=[CONFIG_FILE])
    try:
        return DFlashConfig.read(folder, kinds=(PLAIN, SELECTOR, DOMINO))
    except DrafterError as error:
        raise ValueError(f"DDTREE cannot use this drafter: {error}.") from None


def _refuse_images(target: ModelConfig) -> None:
    if target.is_multimodal:
        raise ValueError(
            f"This target is a {target.hf_config.model_type}, which takes more than text, and "
            "DDTREE verifies trees of text; leave --speculative-algorithm out, or serve a target "
            "that takes text only."
        )


def _check_recurrent(args: Any, target: ModelConfig) -> None:
    """Recurrent layers are verified over trees by the CPU platform's backend alone."""
    config = mambaish_config(target)
    if config is None:
        return
    if hybrid_gdn_config(target) is None and not isinstance(config, _RECURRENT_CONFIGS):
        raise ValueError(
            "DDTREE verifies trees through the recurrent layers of gated DeltaNet targets, Kimi "
            f"Linear and Nemotron-H, and this target is a {config.model_type}; serve it without "
            "--speculative-algorithm."
        )
    if args.attention_backend != ATTENTION_BACKEND:
        raise ValueError(
            f"This target ({config.model_type}) has recurrent layers, and DDTREE verifies trees "
            f"through them on ddtree-cpu only, not with {args.attention_backend}; serve it without "
            "--speculative-algorithm."
        )
    # Of all ranks together; nothing is published yet that these parameters could be read from.
    with get_parallel().override(attn_tp_size=1, enable_cp_tp_group_sharing=False):
        per_node = recurrent_node_bytes(config.mamba2_cache_params, target.dtype.itemsize)
    per_width = per_node * args.max_running_requests
    free = psutil.virtual_memory().available
    width = args.speculative_num_draft_tokens
    if width * per_width > free:
        raise ValueError(
            f"A width of {width} keeps {width * per_width >> 20} MiB of this target's recurrent "
            f"layers for {args.max_running_requests} running requests, and {free >> 20} MiB of "
            f"memory are free; lower --speculative-num-draft-tokens to {free // per_width} or "
            "--max-running-requests."
        )


def recurrent_node_bytes(params: BaseLinearStateParams, itemsize: int) -> int:
    """What one node of a verify leaves behind until the commit, over all recurrent layers.

    Args:
        params: shapes of the layers' states, all of one kind.
        itemsize: bytes of an input of the convolution.
    """
    heads, value_size, key_size = params.shape.temporal
    gates = key_size if params.is_kda else 1
    channels = max(params.shape.conv[0])
    return len(params.layers) * node_bytes(heads, key_size, value_size, gates, channels, itemsize)


def _resolve_widths(args: Any, drafter: DFlashConfig, target: ModelConfig) -> None:
    """Verify width and draft block size, two numbers with one flag each."""
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = DEFAULT_WIDTH
    width = int(args.speculative_num_draft_tokens)
    if width < 2:
        raise ValueError(
            f"DDTREE verifies the root and its drafted nodes, so --speculative-num-draft-tokens "
            f"must be 2 or more, and it is {width}."
        )
    if args.speculative_dflash_block_size is None:
        args.speculative_dflash_block_size = drafter.block_size
    block = int(args.speculative_dflash_block_size)
    if not 2 <= block <= drafter.block_size:
        raise ValueError(
            f"--speculative-dflash-block-size is {block}; this drafter was trained for blocks of "
            f"{drafter.block_size}, so it must be 2 to {drafter.block_size}."
        )
    window = 2 * max(width, block)
    limits = {"the context length": target.context_len, "--max-total-tokens": args.max_total_tokens}
    for name, limit in limits.items():
        if limit is not None and window >= limit:
            raise ValueError(
                f"A width of {width} with blocks of {block} reserves {window} K/V slots per "
                f"request, which does not fit {name} of {limit}; lower the width to "
                f"{max(2, (limit - 1) // 2)} or raise the limit."
            )


def _resolve_backends(args: Any, platform: SRTPlatform, target: ModelConfig) -> None:
    """Attention backends for target and drafter that read a tree mask."""
    if platform.is_out_of_tree():
        if not platform.supports_speculative_algorithm("DDTREE"):
            raise ValueError(
                f"DDTREE is not supported by the platform {type(platform).__name__}; unset "
                "SGLANG_PLATFORM or choose ddtree-cpu."
            )
        default = platform.get_default_attention_backend()
    else:
        default = "triton"
    for field in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        chosen = getattr(args, field)
        if chosen is not None and chosen not in TREE_BACKENDS:
            raise ValueError(
                f"--{field.replace('_', '-')} {chosen} cannot verify a tree; choose one of "
                f"{', '.join(TREE_BACKENDS)}."
            )
    if args.attention_backend is None:
        args.attention_backend = default
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = args.attention_backend
    sliding = getattr(target.hf_text_config, "sliding_window", None)
    if sliding and args.attention_backend != ATTENTION_BACKEND and _uses_window(target):
        raise ValueError(
            f"This target has sliding-window layers, and {args.attention_backend} measures their "
            "window by node index instead of depth; DDTREE serves them only on ddtree-cpu."
        )
    if target.attention_arch == AttentionArch.MLA and args.attention_backend != ATTENTION_BACKEND:
        raise ValueError(
            "This target has latent attention (MLA), over which DDTREE verifies trees on "
            f"{ATTENTION_BACKEND} only, not on {args.attention_backend}; serve it without "
            "--speculative-algorithm."
        )


def _uses_window(target: ModelConfig) -> bool:
    config = target.hf_text_config
    types = getattr(config, "layer_types", None)
    if types:
        return "sliding_attention" in types
    return bool(getattr(config, "use_sliding_window", True))
