"""The one list of SGLang names this plugin touches, checked when DDTREE is really used.

A missing or changed name stops the launch with the name, the tested releases and what to do,
instead of failing somewhere in a round.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

TESTED_RELEASES = ("0.5.23",)

_WORKER = "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2"

# Names, and for callables the parameters that are passed to them.
TOUCHPOINTS: dict[str, tuple[str, ...]] = {
    "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul_add": (
        "hidden_states", "gate_weight", "shared_output", "final_hidden_states",
    ),
    "sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_func": (
        "req_pool_indices", "req_to_token", "start_offset", "end_offset", "batch_size",
        "draft_token_num", "device",
    ),
    "sglang.kernels.ops.attention.fla.fused_norm_gate:FusedRMSNormGated.forward": ("x", "g"),
    "sglang.kernels.ops.attention.triton_gdn_fused_proj:fused_qkvzba_split_reshape_cat": (
        "mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v",
    ),
    "sglang.kernels.ops.attention.triton_gdn_fused_proj:fused_qkvzba_split_reshape_cat_contiguous":
    ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
    "sglang.srt.configs.hybrid_arch:hybrid_gdn_config": (),
    "sglang.srt.configs.hybrid_arch:mambaish_config": (),
    "sglang.srt.configs.mamba_utils:BaseLinearStateParams.mamba_cache_per_req": (),
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": ("server_args",),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.accept_token": ("token",),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.allocate_vocab_mask": (
        "vocab_size", "batch_size", "device",
    ),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask": (
        "vocab_mask", "idx",
    ),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.is_terminated": (),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.rollback": ("k",),
    "sglang.srt.constrained.base_grammar_backend:GrammarMask": ("grammar", "vocab_mask"),
    "sglang.srt.environ:envs.SGLANG_MAMBA_CONV_DTYPE": (),
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": (),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend"
    ".update_mamba_state_after_mtp_verify": (
        "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track", "model",
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"
    ".init_forward_metadata": ("forward_batch",),
    "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend": ("model_runner",),
    "sglang.srt.layers.linear:LinearBase": (),
    "sglang.srt.layers.logits_processor:LogitsProcessor.is_deferred_shard": (),
    "sglang.srt.layers.logits_processor:LogitsProcessor.finish_deferred_gather": (),
    "sglang.srt.layers.logprob_processor:compute_spec_logprobs": (
        "batch", "logits_output", "predict", "accept_index",
    ),
    "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod.apply": (
        "layer", "x", "bias",
    ),
    "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod.apply": ("layer", "x", "bias"),
    "sglang.srt.layers.sampler:Sampler._sample_from_probs": (
        "probs", "sampling_info", "positions", "simple_sampling_case",
    ),
    "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding": (),
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native": (),
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe:swiglu_gpt_oss_sigmoid_alpha": (
        "x", "gemm1_alpha", "gemm1_limit",
    ),
    "sglang.srt.layers.radix_linear_attention:RadixLinearAttention": (),
    "sglang.srt.lora.layers:unwrap_lora_layer": (),
    "sglang.srt.managers.overlap_utils:FutureMap": (
        "device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay",
    ),
    "sglang.srt.managers.scheduler:GenerationBatchResult": (
        "logits_output", "next_token_ids", "accept_lens", "can_run_cuda_graph", "next_draft_input",
        "speculative_num_draft_tokens", "speculative_output_stride", "new_seq_lens",
        "routed_experts_output", "indexer_topk_output",
    ),
    "sglang.srt.managers.schedule_batch:Req.update_finish_state": ("new_accepted_len",),
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": (
        "batch", "forward_batch", "is_verify", "skip_attn_backend_init",
    ),
    "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func": (
        "req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc",
        "batch_size",
    ),
    "sglang.srt.mem_cache.allocation:get_last_loc": (
        "req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor",
    ),
    "sglang.srt.mem_cache.allocation:get_last_loc_torch": (
        "req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor",
    ),
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode": (),
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_page_size": (),
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode": (),
    "sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len": (),
    "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan": (
        "req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent",
    ),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.bind": ("batch", "reader", "cols"),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.write_ids": ("reader",),
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache": (
        "total_rest_memory",
    ),
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.mamba_pool_cls": (),
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.mamba2_layer_cache": ("layer_id",),
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc": ("loc", "swa_loc"),
    "sglang.srt.mem_cache.memory_pool:MambaPool": ("speculative_num_draft_tokens",),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache": ("tgt_loc", "src_loc"),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup": (),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._move_kv_cache_impl": ("tgt_loc", "src_loc"),
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa": (),
    "sglang.srt.model_executor.forward_batch_info:enable_num_token_non_padded": (),
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode": (),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": (),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
        "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc",
        "seq_lens_sum", "seq_lens_cpu", "positions", "input_embeds", "spec_algorithm", "spec_info",
        "capture_hidden_mode", "num_token_non_padded", "global_num_token_non_padded_cpu",
        "can_run_decode_cuda_graph",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.mamba_track_aligned_lens": (),
    "sglang.srt.model_executor.model_runner:ModelRunner.prewarm_sampling": (),
    "sglang.srt.configs.model_config:AttentionArch.MLA": (),
    "sglang.srt.arg_groups.model_override_base:resolving_view": (),
    "sglang.srt.arg_groups.model_override_base:model_config_of": ("server_args",),
    "sglang.srt.arg_groups.overrides:declare_resolution": ("server_args", "source"),
    "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook": ("name",),
    "sglang.srt.models.dflash:_radix_topk": ("scores", "k"),
    "sglang.srt.models.kimi_linear:KimiLinearForCausalLM.set_dspark_layers_to_capture": (
        "layer_ids",
    ),
    "sglang.srt.models.qwen2:Qwen2ForCausalLM.set_eagle3_layers_to_capture": ("layer_ids",),
    "sglang.srt.models.qwen2_moe:Qwen2MoeForCausalLM.set_eagle3_layers_to_capture": ("layer_ids",),
    "sglang.srt.models.dflash:DFlashDraftModel.forward": (
        "input_ids", "positions", "forward_batch", "input_embeds",
    ),
    "sglang.srt.platforms.interface:SRTPlatform": (),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.srt.runtime_context:get_schedule": (),
    "sglang.srt.runtime_context:get_spec": (),
    "sglang.srt.sampling.sampling_batch_info:ProcessorEntry": ("processor", "rows", "indices"),
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": (
        "temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "is_all_greedy",
        "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling", "logit_bias",
        "has_custom_logit_processor", "custom_logit_processor", "custom_params",
        "penalizer_orchestrator", "acc_additive_penalties",
        "acc_scaling_penalties",
    ),
    "sglang.srt.speculative.dflash_info:DFlashVerifyInput": (
        "draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode",
        "kv_loc_plan", "kv_loc_cols",
    ),
    "sglang.srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify": (
        "batch", "target_worker",
    ),
    "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2": (
        "topk_p", "topk_index", "bonus_tokens", "new_seq_lens", "hidden_states",
    ),
    "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2.prepare_for_decode": ("batch",),
    "sglang.srt.models.dflash:DFlash2DraftModel": (),
    "sglang.srt.models.dflash:CandidateSelector.build_lattice": (
        "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids",
    ),
    "sglang.srt.speculative.dflash_worker_v2:_selector_lattice": (
        "draft_model", "pred_hidden", "anchor_token_ids",
    ),
    "sglang.srt.speculative.dflash_utils:is_dense_head_weight": (),
    "sglang.srt.speculative.dflash_utils:resolve_dflash_verify_mask_policy": ("attn_backend",),
    _WORKER: (
        "server_args", "gpu_id", "nccl_port", "target_worker",
    ),
    f"{_WORKER}.forward_batch_generation": (
        "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors",
    ),
    f"{_WORKER}._append_target_hidden_to_draft_kv_by_loc": (
        "target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens",
    ),
    f"{_WORKER}._draft_write_ids": ("plan",),
    f"{_WORKER}._make_next_draft_input_prefill": (
        "bonus_tokens", "seq_lens",
    ),
    f"{_WORKER}._make_next_draft_input_decode": (
        "bonus_tokens", "new_seq_lens",
    ),
    f"{_WORKER}._maybe_build_draft_sampler": (),
    f"{_WORKER}._validate_phase1_sampling_support": (),
    f"{_WORKER}.init_attention_backends": (),
    f"{_WORKER}.init_cuda_graphs": (),
    f"{_WORKER}.on_verify_complete_cpu": ("num_correct_drafts_per_req", "batch_size"),
    f"{_WORKER}.prewarm_sampling": (),
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register": (
        "name", "supports_overlap", "spec_class",
    ),
    "sglang.srt.speculative.spec_tp_sync:SpecTpSync.sync": (),
    "sglang.srt.speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_ACCEPT_GREEDY": (),
    "sglang.srt.speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE": (),
    "sglang.srt.speculative.spec_utils:_verify_commit_step_indices": (
        "batch", "accept_index", "accept_lens", "draft_token_num",
    ),
    "sglang.srt.speculative.spec_utils:draft_tp_context": ("layout",),
    "sglang.srt.utils.async_probe:sanitize_nan_logits": (),
    "sglang.srt.utils.hf_transformers_utils:download_from_hf": (),
}  # fmt: skip


class IncompatibleRelease(RuntimeError):
    """The installed SGLang is not one this plugin can drive."""


def check_installed_release() -> None:
    """Verify every touchpoint against the installed SGLang.

    Raises:
        IncompatibleRelease: naming everything that is missing or changed.
    """
    problems = [problem for name in TOUCHPOINTS for problem in _problems(name)]
    if problems:
        raise IncompatibleRelease(
            f"DDTREE cannot drive SGLang {version('sglang')}: {'; '.join(problems)}. It was tested "
            f"with SGLang {', '.join(TESTED_RELEASES)}: install one of these, or a newer "
            "sglang-ddtree."
        )


def _problems(name: str) -> Iterator[str]:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        yield f"{name} is missing"
        return
    known = _known_names(found)
    for parameter in TOUCHPOINTS[name]:
        if parameter not in known:
            yield f"{name} has no {parameter!r}"


def _known_names(found: Any) -> set[str]:
    """Parameters of a callable and, for a class, of its constructor and its fields."""
    slots = getattr(found, "__dict__", {}).get("__slots__", ())
    names = set(getattr(found, "__dataclass_fields__", ())) | set(slots)
    try:
        return names | set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return names


def replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Rebind every name in a loaded SGLang module that refers to `original`."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("sglang."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)


def _finish_token_by_token(update: Callable[..., None]) -> Callable[..., None]:
    """Ask whether a request with stop strings is finished after each token of an accepted path.

    Upstream looks for the stop strings in the whole path, in the order of the request's list: a
    string further on, or past an end-of-sequence token, would win over what ends the text first.
    """

    def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
        sampling = self.sampling_params
        if new_accepted_len <= 1 or not (sampling.stop_strs or sampling.stop_regex_strs):
            update(self, new_accepted_len)
            return
        accepted, grammar = self.output_ids, self.grammar
        start = len(accepted) - new_accepted_len
        for end in range(start + 1, len(accepted) + 1):
            self.output_ids = accepted[:end]
            # The matcher stands at the end of the path, where alone it may be asked.
            self.grammar = grammar if end == len(accepted) else None
            update(self, 1)
            accepted[start:end] = self.output_ids[start:]  # a token out of range is replaced
            if self.finished():
                break
        self.output_ids, self.grammar = accepted, grammar

    return update_finish_state


def install_tree_hooks() -> None:
    """Adjust, in a scheduler process that runs DDTREE, what has no other seam."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.models.kimi_linear import KimiLinearForCausalLM
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM
    from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative import dflash_utils

    mask_policy = dflash_utils.resolve_dflash_verify_mask_policy
    headroom = allocation_sizing.get_req_to_token_extra_context_len
    tokens_per_round = allocation_sizing.get_alloc_len_per_decode

    def tree_mask_policy(attn_backend: Any) -> tuple[str, bool]:
        """A captured verify graph must read the mask, also where a chain needs none."""
        return mask_policy(attn_backend)[0], True

    def window_per_round() -> int:
        """The draft block too: it is longer than a narrow tree, and retraction must expect it."""
        return max(tokens_per_round(), get_spec().speculative_dflash_block_size or 0)

    def headroom_for_reservation() -> int:
        """Row headroom for both reserved windows of a request that is near its context limit.

        Upstream leaves room for one window and four tokens at page size 1, while DFLASH reserves
        two windows past the committed length.
        """
        reserve = allocation_sizing.get_alloc_reserve_per_decode()
        return max(headroom(), reserve + allocation_sizing.get_alloc_page_size() - 1)

    Req.update_finish_state = _finish_token_by_token(Req.update_finish_state)
    replace_everywhere(mask_policy, tree_mask_policy)
    replace_everywhere(tokens_per_round, window_per_round)
    replace_everywhere(headroom, headroom_for_reservation)
    # What upstream's DFLASH does not serve: other drafters read the outputs of the same layers.
    for target in (Qwen2ForCausalLM, Qwen2MoeForCausalLM):
        target.set_dflash_layers_to_capture = target.set_eagle3_layers_to_capture
    KimiLinearForCausalLM.set_dflash_layers_to_capture = (
        KimiLinearForCausalLM.set_dspark_layers_to_capture
    )
    Qwen2MoeForCausalLM.get_input_embeddings = lambda self: self.model.embed_tokens
