"""z-lab's checkpoint format, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import CONFIG, ROPE, make_model, tiny_target

from ddtree.drafter import DFlashConfig, DrafterError, load_drafter, save_drafter
from ddtree.drafter.config import check_fits_target

# The keys and the weight names of z-lab/Qwen3-8B-DFlash-b16, at toy widths.
ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 97,
}


def zlab_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc": (32, 64), "hidden_norm": (32,), "norm": (32,)}
    per_layer = {
        "input_layernorm": (32,),
        "mlp.down_proj": (32, 48),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "post_attention_layernorm": (32,),
        "self_attn.k_norm": (16,),
        "self_attn.k_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "self_attn.q_norm": (16,),
        "self_attn.q_proj": (64, 32),
        "self_attn.v_proj": (32, 32),
    }
    for layer in range(3):
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in per_layer.items()})
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def write(folder, config, weights=None):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights if weights is not None else zlab_weights(), folder / "model.safetensors")
    return folder


def test_a_zlab_checkpoint_loads_with_every_weight_in_place(tmp_path):
    drafter = load_drafter(write(tmp_path, ZLAB), target=tiny_target(), dtype=torch.float32)
    assert drafter.target_layer_ids == (1, 3)
    assert (drafter.block_size, drafter.mask_token_id) == (5, 96)
    state = drafter.model.state_dict()
    for name, weight in zlab_weights().items():
        assert torch.equal(state[name], weight.float()), name


def test_a_sharded_checkpoint_loads(tmp_path):
    write(tmp_path, ZLAB)
    weights = zlab_weights()
    names = sorted(weights)
    (tmp_path / "model.safetensors").unlink()
    halves = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in halves.items():
        save_file({n: weights[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: f for f, part in halves.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    drafter = load_drafter(tmp_path, target=tiny_target())
    assert torch.equal(drafter.model.fc.weight, weights["fc.weight"].float())


def test_export_has_zlab_names_and_no_embedding_or_head(tmp_path):
    save_drafter(make_model(CONFIG), CONFIG, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(zlab_weights())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["block_size"] == 5
    assert raw["num_target_layers"] == 6
    assert raw["dflash_config"] == {"mask_token_id": 96, "target_layer_ids": [1, 3]}
    assert raw["rope_parameters"] == ROPE
    assert DFlashConfig.read(tmp_path) == CONFIG


def test_transformers_reads_the_exported_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_drafter(make_model(CONFIG), CONFIG, tmp_path)
    theirs = transformers.Qwen3Config.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    assert theirs.layer_types == ["full_attention"] * 3
    assert theirs.head_dim == 16


def changed(**changes):
    draft = {**ZLAB["dflash_config"], **changes.pop("dflash_config", {})}
    return {**ZLAB, "dflash_config": draft, **changes}


REFUSED = {
    "mask id": (changed(dflash_config={"mask_token_id": 97}), "mask_token_id 97 is outside"),
    "layer id": (changed(dflash_config={"target_layer_ids": [1, 6]}), r"\[1, 6\].*0 to 5"),
    "block of one": (changed(block_size=1), "block_size is 1"),
    "hidden size": (changed(hidden_size=64), "hidden_size 64 and the target 32"),
    "head size": (changed(head_dim=8), "head_dim 8 and the target 16"),
    "rotary base": (changed(rope_theta=1e6), r"rope_theta 1000000.0 and the target 10000.0"),
    "layers": (changed(num_target_layers=9), "num_target_layers 9 and the target 6"),
    "DFlash2": (
        changed(dflash_config={"selector_rank": 64}),
        "is a DFlash2 drafter, and only DFlash",
    ),
    "Domino": (changed(dflash_config={"projector_type": "domino"}), "is a Domino drafter"),
    "other parts": (changed(dflash_config={"emb_dim": 8}), "emb_dim=8 marks a variant"),
    "LiLiCorr": (changed(architectures=["LiLiCorrDraftModel"]), "is a LiLiCorr drafter"),
    "dynamic rope": (changed(rope_scaling={"rope_type": "dynamic"}), "'dynamic' is not supported"),
    "no mask id": (changed(dflash_config={"mask_token_id": None}), "mask_token_id is missing"),
    "missing key": (changed(intermediate_size=None), "lacks intermediate_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_clear_sentence(case, tmp_path):
    config, message = REFUSED[case]
    with pytest.raises(DrafterError, match=message) as caught:
        load_drafter(write(tmp_path, config), target=tiny_target())
    assert "\n" not in str(caught.value)


def test_heads_of_latent_attention_say_nothing_about_a_drafters():
    from transformers import DeepseekV3Config

    target = DeepseekV3Config(
        hidden_size=32, num_hidden_layers=6, num_attention_heads=4, qk_rope_head_dim=8,
        kv_lora_rank=16, rope_theta=10000.0,
    )  # fmt: skip
    check_fits_target(DFlashConfig.from_dict(ZLAB), target, rows=97)
    with pytest.raises(DrafterError, match="num_target_layers 9 and the target 6"):
        check_fits_target(DFlashConfig.from_dict(changed(num_target_layers=9)), target, rows=97)


def test_weights_of_another_variant_are_refused(tmp_path):
    weights = {**zlab_weights(), "candidate_selector.codebook.weight": torch.zeros(2, 2)}
    with pytest.raises(DrafterError, match=r"unexpected .*candidate_selector"):
        load_drafter(write(tmp_path, ZLAB, weights), target=tiny_target())


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DrafterError, match=r"config\.json is missing"):
        load_drafter(tmp_path, target=tiny_target())
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    with pytest.raises(DrafterError, match=r"lacks model\.safetensors"):
        load_drafter(tmp_path, target=tiny_target())
    with pytest.raises(DrafterError, match="neither a folder nor a hub id"):
        load_drafter(tmp_path / "absent", target=tiny_target())
