"""Hybrid targets (gated DeltaNet beside attention): plain, DFLASH and DDTREE say the same in fp32.

The layers run in plain torch on the CPU platform; transformers is the second opinion on what the
plain server says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import families
from .conftest import ServerPool, TinyModels, outcome, tiny_requests
from .test_families import dflash
from .test_tree_equals_plain import mean_accept_length

pytestmark = pytest.mark.timeout(900)

FAMILY = "qwen3_next"


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
    plain: list[Any], requests: list[dict[str, Any]]
) -> None:
    model = families.family_model(FAMILY)
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


@pytest.mark.parametrize("width", [2, 9, 33])
def test_trees_say_the_same(
    servers: ServerPool,
    models: TinyModels,
    requests: list[dict[str, Any]],
    plain: list[Any],
    width: int,
) -> None:
    server = servers.get(*models.ddtree(width))
    trees = server.generate_all(requests)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
    assert mean_accept_length(trees) > 1
    # Again, in mixed batches and from the radix cache.
    trees = server.generate_all(requests, at_once=8, seed=1)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
