"""Tiny random targets of several architectures, and a drafter that knows the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.drafter import ContextCache, random_drafter

VOCAB = 61
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOWED = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
_MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_KIMI = _LATENT | {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": _GATED_DELTA["layer_types"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "model_max_length": 128,
}
_MAMBA2 = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-windowed": ("Qwen3", _WINDOWED),
    "qwen2-moe": ("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 16}),
    "qwen3-moe": ("Qwen3Moe", _MOE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWED}),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "qwen3-next": ("Qwen3Next", _MOE | _GATED_DELTA | {"shared_expert_intermediate_size": 16}),
    "kimi-linear": ("KimiLinear", _KIMI),
    "nemotron-h": ("NemotronH", _MAMBA2),
}
RECURRENT = {"qwen3-next", "kimi-linear", "nemotron-h"}  # a state per node


def tiny_target(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random float32 target of one of `ARCHITECTURES`."""
    import transformers

    family, special = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **special, **changes})
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def plain(target: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own `generate`: the oracle."""
    out = target.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


class ScriptedDrafter:
    """Drafts from a known text, the right token at a random rank, so that paths are long.

    It keeps a real context cache, and fails if the engine's context is not exactly what was
    committed before the root.
    """

    def __init__(self, target: Any, text: list[int], block_size: int = 8, seed: int = 0) -> None:
        self._real = random_drafter(target, block_size=block_size)
        self._text = text
        self._noise = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.target_layer_ids = self._real.target_layer_ids
        self.new_cache = self._real.new_cache
        self.extend_context = self._real.extend_context

    def draft_logits(
        self, cache: ContextCache, root_tokens: Tensor, root_positions: Tensor
    ) -> Tensor:
        assert cache.length == int(root_positions)
        logits = 3 * torch.randn(1, self.block_size - 1, VOCAB, generator=self._noise)
        known = self._text[cache.length + 1 :][: self.block_size - 1]
        for slot, token in enumerate(known):
            rank = int(3 * torch.rand(1, generator=self._noise) ** 2)  # 0, 1 or 2; 0 in most cases
            logits[0, slot, token] = logits[0, slot].sort(descending=True).values[rank] + 1e-3
        return logits
