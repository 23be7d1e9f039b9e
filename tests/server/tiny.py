"""Tiny random targets and drafters, so that servers exercise long accepted paths in seconds.

With a vocabulary of 24 even an untrained drafter is often right, because the tree holds most
continuations of the first levels. Weights are wide enough that the greedy choice has clear margins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 24
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
TARGET_LAYERS = 3
DRAFT_LAYERS = 2
BLOCK_SIZE = 8
MASK_TOKEN_ID = VOCABULARY - 1

_SHARED_CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def write_target(folder: Path) -> Path:
    """A random Llama in Hugging Face format."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": _normal(generator, VOCABULARY, HIDDEN, scale=1.0),
        "lm_head.weight": _normal(generator, VOCABULARY, HIDDEN, scale=0.5),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(TARGET_LAYERS):
        weights |= _decoder_layer(generator, f"model.layers.{layer}.", qk_norm=False)
    settings = _SHARED_CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    return _write(folder, settings, weights)


def write_drafter(
    folder: Path, *, seed: int = 1, vocabulary: int = VOCABULARY, **config: Any
) -> Path:
    """A random drafter in z-lab's checkpoint format for targets of `write_target`'s shape.

    Its mask token is the vocabulary's last; a `dflash_config` adds to its own.

    Its final norm is small, so its distributions are nearly flat and its trees wide: about two
    thirds of the rounds accept a node.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "norm.weight": torch.full((HIDDEN,), 0.1),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": _normal(generator, HIDDEN, 2 * HIDDEN),
    }
    for layer in range(DRAFT_LAYERS):
        weights |= _decoder_layer(generator, f"layers.{layer}.", qk_norm=True)
    settings = _SHARED_CONFIG | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK_SIZE,
        "vocab_size": vocabulary,
    }
    draft = {"mask_token_id": vocabulary - 1, "target_layer_ids": [0, 1]}
    settings["dflash_config"] = draft | config.pop("dflash_config", {})
    return _write(folder, settings | config, weights)


def write_selector_drafter(
    folder: Path, *, seed: int = 1, vocabulary: int = VOCABULARY, rank: int = 8, top_k: int = 6
) -> Path:
    """A random DFlash2 drafter: `write_drafter`'s with convolutions and a candidate selector."""
    from safetensors.torch import load_file

    parts = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank,
             "selector_top_k": top_k}  # fmt: skip
    write_drafter(folder, seed=seed, vocabulary=vocabulary, architectures=["DFlash2DraftModel"],
                  dflash_config=parts)  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    weights = load_file(folder / "model.safetensors")
    for table in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{table}"] = _normal(generator, vocabulary, rank)
    weights["candidate_selector.hidden_projection.weight"] = _normal(generator, rank, HIDDEN)
    for layer in range(DRAFT_LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            base = _normal(generator, 2, 2, HIDDEN, scale=0.1)
            base[:, 0] += 1
            weights[f"layers.{layer}.{part}.base_kernel"] = base
            weights[f"layers.{layer}.{part}.kernel_projection.weight"] = _normal(
                generator, 2 * 2 * (HIDDEN // 16), HIDDEN
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_domino_drafter(
    folder: Path,
    *,
    seed: int = 1,
    vocabulary: int = VOCABULARY,
    width: int = 24,
    shift_label: bool = False,
) -> Path:
    """A random Domino drafter: `write_drafter`'s with a GRU over the drafted prefix."""
    from safetensors.torch import load_file

    parts = {"projector_type": "domino", "gru_hidden_dim": width, "emb_dim": 16,
             "pure_draft_prefix_len": 1, "shift_label": shift_label}  # fmt: skip
    write_drafter(folder, seed=seed, vocabulary=vocabulary, dflash_config=parts)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = load_file(folder / "model.safetensors")
    shapes = {"prefix_gru.weight_ih_l0": (3 * width, HIDDEN),
              "prefix_gru.weight_hh_l0": (3 * width, width),
              "embed_proj.0.weight": (16, HIDDEN + width),
              "embed_proj.2.weight": (vocabulary, 16)}  # fmt: skip
    weights |= {name: _normal(generator, *shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _normal(generator: torch.Generator, *shape: int, scale: float | None = None) -> torch.Tensor:
    scale = shape[-1] ** -0.5 if scale is None else scale
    return torch.randn(*shape, generator=generator) * scale


def _decoder_layer(
    generator: torch.Generator, prefix: str, *, qk_norm: bool
) -> dict[str, torch.Tensor]:
    head_dim = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (128, HIDDEN),
        "mlp.up_proj": (128, HIDDEN),
        "mlp.down_proj": (HIDDEN, 128),
    }
    weights = {
        f"{prefix}{name}.weight": _normal(generator, *shape) for name, shape in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    if qk_norm:
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(head_dim)
    return weights
