"""Tiny random targets of the families that people have drafters for, with their real config keys.

transformers writes the checkpoints, so the servers load what a hub checkpoint of the family looks
like. Weights are redrawn wide enough that the greedy choice has clear margins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from . import tiny

_SHARED = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": tiny.HIDDEN,
    "num_attention_heads": tiny.HEADS,
    "num_key_value_heads": tiny.KV_HEADS,
    "head_dim": tiny.HIDDEN // tiny.HEADS,
    "num_hidden_layers": tiny.TARGET_LAYERS,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
# What hub checkpoints of a family say besides, or in place of what transformers writes (None).
_HUB_KEYS: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 0,
        "mla_use_nope": True,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*M",
        "layers_block_type": None,
        "rope_parameters": None,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 64,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"intermediate_size": 128},
    "qwen3": {"intermediate_size": 128},
    "qwen3_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_next": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "deepseek_v3": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "num_key_value_heads": tiny.HEADS,
        # The only scaling that SGLang's MLA knows on a CPU, and the real checkpoints'.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "kimi_linear": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": tiny.HEADS,
        "routed_scaling_factor": 1.5,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse"] * tiny.TARGET_LAYERS,
    },
    "nemotron_h": {
        "intermediate_size": 128,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
    },
}


def family_model(family: str, *, seed: int = 0, **config: Any) -> Any:
    """A random float32 transformers model of a family; extra keys go into its config."""
    settings = AutoConfig.for_model(family, **(_SHARED | FAMILIES[family] | config))
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                if "bias" in name or "sinks" in name:
                    weight.normal_(0, 0.1, generator=generator)
                continue
            scale = {"embed_tokens": 1.0, "lm_head": 0.5}.get(name.split(".")[-2])
            weight.normal_(0, scale or weight.shape[-1] ** -0.5, generator=generator)
    return model


def write_family(folder: Path, family: str, *, seed: int = 0, **config: Any) -> Path:
    """The checkpoint of `family_model`."""
    family_model(family, seed=seed, **config).save_pretrained(folder)
    return _with_hub_keys(folder)


def write_config(folder: Path, family: str, architecture: str) -> Path:
    """A checkpoint without weights, for what is decided before they are loaded."""
    settings = AutoConfig.for_model(family, **(_SHARED | {"architectures": [architecture]}))
    settings.save_pretrained(folder)
    return _with_hub_keys(folder)


def _with_hub_keys(folder: Path) -> Path:
    """SGLang reads the hub's checkpoints' keys, and a drafter is matched by one of them."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings |= _HUB_KEYS.get(settings["model_type"], {})
    if settings["rope_parameters"] is not None:
        settings.setdefault("rope_theta", settings["rope_parameters"]["rope_theta"])
    settings = {key: value for key, value in settings.items() if value is not None}
    path.write_text(json.dumps(settings, indent=1))
    return folder
