"""Hybrid targets (recurrent layers beside attention): plain, DFLASH, DDTREE say the same in fp32.

The layers run in plain torch on the CPU platform; transformers is the second opinion on what the
plain server says.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from . import families
from .conftest import (
    ANY_WIDTH,
    RETRACTING,
    Server,
    ServerPool,
    TinyModels,
    outcome,
    rounds_by_arm,
    tiny_requests,
)
from .test_families import dflash
from .test_tree_equals_plain import mean_accept_length

pytestmark = pytest.mark.timeout(900)

FAMILY = "qwen3_next"
LONG = {"max_new_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    folder = tmp_path_factory.mktemp("hybrid")
    return TinyModels(families.write_family(folder / FAMILY, FAMILY), tiny_models.drafter)


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    return tiny_requests(16, seed=5)


@pytest.fixture(scope="module")
def plain(servers: ServerPool, models: TinyModels, requests: list[dict[str, Any]]) -> list[Any]:
    """The plain server's answers, asked one by one."""
    return servers.get(*models.plain()).generate_all(requests)


def assert_transformers_says(
    target: Path, requests: list[dict[str, Any]], answers: list[Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for request, answer in zip(requests, answers, strict=True):
        prompt, said = request["input_ids"], answer["output_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == said
        ended = answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert ended or len(said) == request["sampling_params"]["max_new_tokens"]


def test_the_plain_server_says_what_transformers_says(
    models: TinyModels, plain: list[Any], requests: list[dict[str, Any]]
) -> None:
    assert_transformers_says(models.target, requests, plain)


def test_chains_say_the_same(
    servers: ServerPool, models: TinyModels, requests: list[dict[str, Any]], plain: list[Any]
) -> None:
    chains = servers.get(*dflash(models)).generate_all(requests, at_once=8)
    assert [outcome(a) for a in chains] == [outcome(a) for a in plain]
    assert mean_accept_length(chains) > 1


# A snapshot for the radix cache every 64 tokens, also between a tree's nodes.
TRACKED = ("--mamba-track-interval", "64", "--chunked-prefill-size", "64")
# Width 9 stands for every width up to it, in turn; width 2 is served in a pool that fills.
SERVED: dict[int, tuple[tuple[str, ...], dict[str, str]]] = {
    33: (TRACKED, {}),
    9: (("--enable-metrics",), ANY_WIDTH | RETRACTING),
    2: (("--max-total-tokens", "640", "--disable-radix-cache"), RETRACTING),
}


def serve(servers: ServerPool, models: TinyModels, width: int) -> Server:
    flags, environment = SERVED[width]
    return servers.get(*models.ddtree(width, *flags), environment=environment)


@pytest.mark.parametrize("width", [33, 9, pytest.param(2, marks=pytest.mark.slow)])
def test_trees_say_the_same(
    servers: ServerPool,
    models: TinyModels,
    requests: list[dict[str, Any]],
    plain: list[Any],
    width: int,
) -> None:
    server = serve(servers, models, width)
    trees = server.generate_all(requests)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
    assert mean_accept_length(trees) > 1
    # Again, in mixed batches and where there is one from the radix cache.
    trees = server.generate_all(requests, at_once=8, seed=1)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
    if width == 9:
        assert rounds_by_arm(server).keys() == {"plain", "chain8", "tree5", "tree9"}


def test_a_second_turn_starts_from_the_state_of_an_accepted_node(
    servers: ServerPool, models: TinyModels
) -> None:
    """The first turn ends at 144 tokens, so what is cached of it was tracked inside a tree."""
    server = serve(servers, models, 33)
    rng = random.Random(3)
    sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    second_turns = []
    for _ in range(8):
        prompt = [rng.randrange(3, 20) for _ in range(80)]
        answer = server.generate({"input_ids": prompt, "sampling_params": sampling})
        follow_up = [rng.randrange(3, 20) for _ in range(10)]
        text = prompt + answer["output_ids"] + follow_up
        second_turns.append({"input_ids": text, "sampling_params": sampling})
    warm = server.generate_all(second_turns, at_once=4)
    assert {a["meta_info"]["cached_tokens"] for a in warm} == {128}
    cold = servers.get(*models.plain()).generate_all(second_turns)
    assert [outcome(a) for a in warm] == [outcome(a) for a in cold]


def test_requests_are_retracted_and_resumed(
    servers: ServerPool, models: TinyModels, requests: list[dict[str, Any]]
) -> None:
    server = serve(servers, models, 9)
    long = [r | {"sampling_params": r["sampling_params"] | LONG} for r in requests]
    answers = server.generate_all(long, at_once=16, seed=2)
    expected = servers.get(*models.plain()).generate_all(long)
    assert [outcome(a) for a in answers] == [outcome(a) for a in expected]
    assert sum(a["meta_info"].get("num_retractions", 0) for a in answers) > 0


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h"])
def test_other_kinds_of_recurrent_layers(
    servers: ServerPool,
    tiny_models: TinyModels,
    requests: list[dict[str, Any]],
    tmp_path: Path,
    family: str,
    request: pytest.FixtureRequest,
) -> None:
    """Kimi Delta Attention and Mamba2, retracted again and again; plain servers with `--slow`."""
    target = families.write_family(tmp_path / family, family)
    models = replace(tiny_models, target=target)
    server = servers.get(*models.ddtree(33, *TRACKED), environment=RETRACTING)
    wanted = server.generate_all(requests)
    assert_transformers_says(target, requests, wanted)
    assert mean_accept_length(wanted) > 1
    if request.config.getoption("--slow"):
        plain = servers.get(*models.plain()).generate_all(requests)
        assert [outcome(a) for a in plain] == [outcome(a) for a in wanted]
    trees = server.generate_all(requests, at_once=8, seed=1)
    assert [outcome(a) for a in trees] == [outcome(a) for a in wanted]
    assert max(a["meta_info"]["cached_tokens"] for a in trees) > 0
    assert sum(a["meta_info"].get("num_retractions", 0) for a in trees) > 0


@pytest.mark.slow
def test_chains_through_mamba2_layers_say_the_same(
    servers: ServerPool, tiny_models: TinyModels, requests: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Upstream's DFLASH serves Nemotron-H; Kimi Linear it does not."""
    models = replace(tiny_models, target=families.write_family(tmp_path / "target", "nemotron_h"))
    plain = servers.get(*models.plain()).generate_all(requests)
    chains = servers.get(*dflash(models)).generate_all(requests, at_once=8)
    assert [outcome(a) for a in chains] == [outcome(a) for a in plain]
    assert mean_accept_length(chains) > 1


def test_the_launch_says_what_the_nodes_take(servers: ServerPool, models: TinyModels) -> None:
    server = serve(servers, models, 33)
    log = server.log.read_text(encoding="utf-8", errors="replace")
    # Two layers; per node 4 heads of a key and a value of 16 and a decay, and 128 channels.
    per_node = 2 * (4 * ((16 + 16) * 4 + 8) + 128 * 4) / 1024
    assert f"keep {per_node:.1f} KiB per tree node: {per_node * 264 / 1024:.1f} MiB" in log
