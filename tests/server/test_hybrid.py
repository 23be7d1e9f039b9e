"""Hybrid targets (gated DeltaNet beside attention): plain, DFLASH and DDTREE say the same in fp32.

The layers run in plain torch on the CPU platform; transformers is the second opinion on what the
plain server says.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from . import families
from .conftest import RETRACTING, Server, ServerPool, TinyModels, outcome, tiny_requests
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


def test_the_plain_server_says_what_transformers_says(
    models: TinyModels, plain: list[Any], requests: list[dict[str, Any]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    for request, answer in zip(requests, plain, strict=True):
        prompt, said = request["input_ids"], answer["output_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == said


def test_chains_say_the_same(
    servers: ServerPool, models: TinyModels, requests: list[dict[str, Any]], plain: list[Any]
) -> None:
    chains = servers.get(*dflash(models)).generate_all(requests, at_once=8)
    assert [outcome(a) for a in chains] == [outcome(a) for a in plain]
    assert mean_accept_length(chains) > 1


# Width 33 with a snapshot for the radix cache every 64 tokens, also between a tree's nodes; width 9
# by the defaults; width 2 in a pool that does not hold all the requests it is told to admit.
SERVED: dict[int, tuple[tuple[str, ...], dict[str, str]]] = {
    33: (("--mamba-track-interval", "64", "--chunked-prefill-size", "64"), {}),
    9: ((), {}),
    2: (
        (
            "--max-total-tokens",
            "640",
            "--schedule-conservativeness",
            "0.1",
            "--disable-radix-cache",
        ),
        RETRACTING,
    ),
}


def serve(servers: ServerPool, models: TinyModels, width: int) -> Server:
    flags, environment = SERVED[width]
    return servers.get(*models.ddtree(width, *flags), environment=environment)


@pytest.mark.parametrize("width", [33, pytest.param(9, marks=pytest.mark.slow), 2])
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
    server = serve(servers, models, 2)
    long = [r | {"sampling_params": r["sampling_params"] | LONG} for r in requests]
    answers = server.generate_all(long, at_once=16, seed=2)
    expected = servers.get(*models.plain()).generate_all(long)
    assert [outcome(a) for a in answers] == [outcome(a) for a in expected]
    assert sum(a["meta_info"].get("num_retractions", 0) for a in answers) > 0


def test_the_launch_says_what_the_nodes_take(servers: ServerPool, models: TinyModels) -> None:
    server = serve(servers, models, 33)
    log = server.log.read_text(encoding="utf-8", errors="replace")
    # Two layers; per node 4 heads of a key and a value of 16 and a decay, and 128 channels.
    per_node = 2 * (4 * ((16 + 16) * 4 + 8) + 128 * 4) / 1024
    assert f"keep {per_node:.1f} KiB per tree node: {per_node * 264 / 1024:.1f} MiB" in log
