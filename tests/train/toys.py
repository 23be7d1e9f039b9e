"""A toy target, toy documents and a toy drafter for the training tests."""

from __future__ import annotations

import torch

from ddtree.drafter import DFlashConfig, DFlashDraftModel
from ddtree.train.sources import target_features
from ddtree.train.store import Document

VOCAB = 53
LAYERS = (0, 2)
BLOCK = 4


def toy_target(seed: int = 0):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    # Embeddings of everyday size, so that a borrowed head can tell tokens apart.
    model.get_input_embeddings().weight.normal_(std=0.5)
    return model


def toy_config(**changes) -> DFlashConfig:
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "num_target_layers": 4,
        "target_layer_ids": LAYERS,
        "mask_token_id": VOCAB - 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **changes,
    }
    return DFlashConfig(**values)


def toy_model(seed: int = 0, **changes) -> DFlashDraftModel:
    torch.manual_seed(seed)
    return DFlashDraftModel(toy_config(**changes))


def toy_document(target, length: int, prompt: int, seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB - 1, (length,), generator=generator)
    features = torch.zeros(0, 64)
    if length > 1:
        features = target_features(target, tokens[None, :-1], LAYERS)[0]
    return Document(tokens, prompt, features, "toy")
