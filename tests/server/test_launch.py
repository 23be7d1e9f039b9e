"""What a launch refuses, in one sentence, before any weight is loaded; and good manners."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import families, tiny
from .conftest import TinyModels

pytestmark = pytest.mark.timeout(300)


class LaunchProbe:
    """A process that resolves server arguments, as a launch does, and says what came of it."""

    SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolved_view
for line in sys.stdin:
    try:
        arguments = prepare_server_args(json.loads(line))
        arguments.resolve_once()
        view = resolved_view(arguments)
        names = ("speculative_num_draft_tokens", "speculative_dflash_block_size",
                 "speculative_draft_attention_backend", "attention_backend", "device")
        answer = {name: getattr(view, name) for name in names}
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("ANSWER " + json.dumps(answer), flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def resolve(self, *arguments: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        pytest.fail("the probe process ended")

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def launch() -> Iterator[LaunchProbe]:
    probe = LaunchProbe()
    yield probe
    probe.close()


def test_widths_and_backends_follow_from_the_drafter(
    launch: LaunchProbe, tiny_models: TinyModels
) -> None:
    resolved = launch.resolve(*tiny_models.ddtree(9))
    assert resolved == {
        "speculative_num_draft_tokens": 9,
        "speculative_dflash_block_size": tiny.BLOCK_SIZE,
        "speculative_draft_attention_backend": "ddtree_sdpa",
        "attention_backend": "ddtree_sdpa",
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--speculative-num-draft-tokens", "1"), "must be 2 or more, and it is 1"),
        (("--speculative-num-draft-tokens", "2000"), "does not fit the context length of 2048"),
        (("--speculative-dflash-block-size", "9"), "trained for blocks of 8"),
        (("--attention-backend", "torch_native"), "cannot verify a tree"),
        (("--pp-size", "2"), "pipeline parallelism"),
        (("--tp-size", "2", "--attn-dp-size", "2"), "DP attention"),
        (("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), "DP attention"),
        (("--disaggregation-mode", "prefill"), "prefill/decode disaggregation"),
        (("--enable-lora", "--lora-paths", "one=somewhere"), "LoRA"),
        (("--enable-two-batch-overlap",), "two-batch overlap"),
        (("--speculative-use-rejection-sampling",), "rejection sampling"),
        (("--speculative-draft-window-size", "512"), "draft window"),
        (("--enable-streaming-session",), "streaming sessions"),
        (("--grammar-backend", "outlines"), "grammars that cannot step back"),
        (("--enable-custom-logit-processor",), "add --disable-overlap-schedule"),
        (("--enable-deterministic-inference",), "deterministic"),
    ],
)
def test_refusals(
    launch: LaunchProbe, tiny_models: TinyModels, extra: tuple[str, ...], says: str
) -> None:
    error = launch.resolve(*tiny_models.ddtree(9, *extra))["error"]
    assert says in error
    assert error.count("\n") == 0


def test_a_missing_drafter_is_named(launch: LaunchProbe, tiny_models: TinyModels) -> None:
    answer = launch.resolve(*tiny_models.plain("--speculative-algorithm", "DDTREE"))
    assert "--speculative-draft-model-path" in answer["error"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 32}, "hidden_size 32 and the target 64"),
        ({"num_target_layers": 7}, "num_target_layers 7 and the target 3"),
        ({"head_dim": 8}, "head_dim 8 and the target 16"),
        ({"rope_theta": 500.0}, "rope_theta 500.0 and the target 10000.0"),
        ({"vocab_size": 999, "dflash_config": {"mask_token_id": 900, "target_layer_ids": [0]}},
         "mask_token_id 900 is outside"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a Qwen3ForCausalLM drafter"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "selector_rank": 4}},
         "would be loaded without them"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0],
                            "projector_type": "domino", "pure_draft_prefix_len": 2}},
         "pure_draft_prefix_len=2 marks a variant of Domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "is a LiLiCorr drafter"),
    ],
)  # fmt: skip
def test_a_drafter_for_another_target_is_refused(
    launch: LaunchProbe,
    tiny_models: TinyModels,
    tmp_path: Path,
    config: dict[str, Any],
    says: str,
) -> None:
    drafter = tiny.write_drafter(tmp_path / "drafter", **config)
    arguments = TinyModels(tiny_models.target, drafter).ddtree(9)
    assert says in launch.resolve(*arguments)["error"]


@pytest.mark.parametrize(
    ("family", "extra", "says"),
    [
        ("deepseek_v3", ("--attention-backend", "triton"), "latent attention"),
        ("qwen3_next", ("--attention-backend", "triton"), "(qwen3_next) has recurrent layers"),
        ("kimi_linear", ("--attention-backend", "triton"), "latent attention"),
        ("nemotron_h", ("--attention-backend", "triton"), "(nemotron_h) has recurrent layers"),
        ("nemotron_h", ("--max-running-requests", "100000000"), "are free; lower"),
        ("qwen3_next", ("--max-running-requests", "100000000"), "are free; lower"),
    ],
)
def test_refused_targets(
    launch: LaunchProbe,
    tiny_models: TinyModels,
    tmp_path: Path,
    family: str,
    extra: tuple[str, ...],
    says: str,
) -> None:
    target = families.write_family(tmp_path / family, family)
    arguments = TinyModels(target, tiny_models.drafter).ddtree(9, *extra)
    assert says in launch.resolve(*arguments)["error"]


def test_a_target_that_takes_images_is_refused(
    launch: LaunchProbe, tiny_models: TinyModels, tmp_path: Path
) -> None:
    from transformers import Qwen2VLConfig

    text = json.loads((tiny_models.target / "config.json").read_text())
    sizes = {key: value for key, value in text.items() if isinstance(value, int)}
    config = Qwen2VLConfig(text_config=sizes, architectures=["Qwen2VLForConditionalGeneration"])
    config.save_pretrained(tmp_path / "target")
    arguments = TinyModels(tmp_path / "target", tiny_models.drafter).ddtree(9)
    assert "takes more than text" in launch.resolve(*arguments)["error"]


def test_recurrent_layers_of_another_kind_are_refused(
    launch: LaunchProbe, tiny_models: TinyModels, tmp_path: Path
) -> None:
    target = families.write_config(tmp_path / "falcon_h1", "falcon_h1", "FalconH1ForCausalLM")
    arguments = TinyModels(target, tiny_models.drafter).ddtree(9)
    assert "this target is a falcon_h1; serve it without" in launch.resolve(*arguments)["error"]


def test_the_algorithm_is_not_there_when_the_plugin_is_left_out(tiny_models: TinyModels) -> None:
    """`SGLANG_PLUGINS` leaves the plugin out, and then nothing of it is imported."""
    script = """
import os, sys
os.environ["SGLANG_PLUGINS"] = "another"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_registry import get_spec
assert get_spec("DDTREE") is None
assert not [name for name in sys.modules if name.startswith("ddtree")]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def test_an_unselected_plugin_imports_no_worker_and_patches_nothing() -> None:
    script = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_registry import get_spec
assert get_spec("DDTREE") is not None
heavy = {"ddtree.sglang.worker", "ddtree.sglang.verify", "ddtree.tree"} & set(sys.modules)
assert not heavy, heavy
from sglang.srt.mem_cache import allocation_sizing
headroom = allocation_sizing.get_req_to_token_extra_context_len
assert headroom.__module__ == allocation_sizing.__name__
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
