"""The draft model against an independent implementation and against itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from ddtree.drafter import (
    DFlashConfig,
    DFlashDraftModel,
    Drafter,
    PackedContext,
    load_drafter,
    random_drafter,
    save_drafter,
)

VOCAB = 97
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIG = DFlashConfig(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=VOCAB,
    block_size=5,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    mask_token_id=96,
    rope_parameters=ROPE,
)
SLIDING = dataclasses.replace(
    CONFIG,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
)
CAUSAL = dataclasses.replace(CONFIG, is_causal=True)


def make_model(config: DFlashConfig, seed: int = 0) -> DFlashDraftModel:
    torch.manual_seed(seed)
    model = DFlashDraftModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    return model.eval()


def tiny_target(**changes):
    transformers = pytest.importorskip("transformers")
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "rope_parameters": ROPE,
        **changes,
    }
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()


@pytest.mark.parametrize("config", [CONFIG, SLIDING, CAUSAL], ids=["full", "sliding", "causal"])
def test_hidden_states_equal_the_dflash_package(config, tmp_path):
    peer_module = pytest.importorskip("dflash.model")
    model = make_model(config)
    save_drafter(model, config, tmp_path, dtype=torch.float32)
    peer = peer_module.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert peer.target_layer_ids == [1, 3]
    assert (peer.block_size, peer.mask_token_id) == (5, 96)

    features = torch.randn(1, 11, 64)
    positions = torch.arange(16)[None]
    blocks = torch.randn(2, 1, 5, 32)
    cache, theirs = model.new_cache(1, 16), peer_module._make_cache(peer.config)
    start = 0
    for end, block in zip((7, 11), blocks, strict=True):
        with torch.no_grad():
            new, at = features[:, start:end], positions[:, start : end + 5]
            wanted = peer(
                target_hidden=new,
                noise_embedding=block,
                position_ids=at,
                past_key_values=theirs,
                use_cache=True,
            )
            peer_module._crop_to(theirs, end)
            model.extend_context(cache, new, at[:, : end - start])
            got = model.draft(cache, block, at[:, end - start :])
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        start = end


@pytest.mark.parametrize("config", [CONFIG, SLIDING, CAUSAL], ids=["full", "sliding", "causal"])
def test_training_forward_equals_inference(config):
    model = make_model(config)
    features, blocks = torch.randn(9, 64), torch.randn(4, 5, 32)
    anchors = torch.tensor([2, 9, 1, 6])  # two documents of 9 and 7 context tokens
    other = torch.randn(7, 64)
    context = PackedContext(torch.cat((features, other)), [9, 7], anchors, [2, 2])
    with torch.no_grad():
        packed = model(context, blocks)
        for row, anchor in enumerate(anchors.tolist()):
            own = features if row < 2 else other
            cache = model.new_cache(1, 20)
            model.extend_context(cache, own[None, :anchor], torch.arange(anchor))
            alone = model.draft(cache, blocks[row : row + 1], anchor + torch.arange(5))
            torch.testing.assert_close(packed[row : row + 1], alone, rtol=1e-4, atol=1e-5)


def test_a_cache_too_small_is_refused():
    model = make_model(CONFIG)
    with pytest.raises(ValueError, match=r"7 positions exceed .* capacity of 6"):
        model.extend_context(model.new_cache(1, 6), torch.randn(1, 7, 64), torch.arange(7))


def test_bfloat16_keeps_exact_rotary_frequencies():
    exact = make_model(CONFIG)
    rounded = make_model(CONFIG).to(torch.bfloat16)
    positions = torch.tensor([3001])
    for ours, theirs in zip(
        exact._rotation(positions, torch.float32),
        rounded._rotation(positions, torch.float32),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_batched_logits_equal_those_of_each_row():
    target = tiny_target()
    drafter = random_drafter(target, block_size=5, num_layers=2)
    features, roots = torch.randn(3, 8, 64), torch.tensor([5, 17, 96])
    cache = drafter.new_cache(3, 8)
    drafter.extend_context(cache, features, torch.arange(8))
    logits = drafter.draft_logits(cache, roots, torch.full((3,), 8))
    assert logits.shape == (3, 4, VOCAB)
    for row in range(3):
        alone = drafter.new_cache(1, 8)
        drafter.extend_context(alone, features[row : row + 1], torch.arange(8))
        one = drafter.draft_logits(alone, roots[row : row + 1], torch.tensor([8]))
        torch.testing.assert_close(logits[row : row + 1], one, rtol=1e-4, atol=1e-5)


def test_embedding_and_head_are_the_targets_own():
    target = tiny_target()
    drafter = random_drafter(target, block_size=3, num_layers=1)
    root = torch.tensor([7])
    ids = torch.tensor([[7, VOCAB - 1, VOCAB - 1]])
    assert torch.equal(drafter.embed_blocks(root), target.get_input_embeddings()(ids))
    cache = drafter.new_cache(1, 0)
    hidden = drafter.model.draft(cache, drafter.embed_blocks(root), torch.arange(3))
    logits = drafter.draft_logits(cache, root, torch.tensor([0]))
    assert torch.equal(logits, F.linear(hidden[:, 1:], target.lm_head.weight))


def test_a_saved_drafter_loads_equal(tmp_path):
    target = tiny_target()
    saved = random_drafter(target, block_size=5, num_layers=2, seed=3)
    save_drafter(saved.model, saved.config, tmp_path, dtype=torch.float32)
    loaded = load_drafter(tmp_path, target=target)
    assert isinstance(loaded, Drafter)
    assert loaded.config == saved.config
    for name, weight in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    assert load_drafter(tmp_path, target=target, dtype=torch.bfloat16).model.fc.weight.dtype == (
        torch.bfloat16
    )
