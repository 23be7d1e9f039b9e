"""The families that people have drafters for: plain, DFLASH and DDTREE say the same in fp32.

Each family is a tiny random checkpoint served by the real server on the CPU platform.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import families, tiny
from .conftest import ServerPool, TinyModels, outcome, tiny_requests
from .test_tree_equals_plain import mean_accept_length

pytestmark = pytest.mark.timeout(900)

WIDTH = 9


def dflash(models: TinyModels) -> tuple[str, ...]:
    return models.plain(
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(models.drafter)),
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_trees_and_chains_say_what_the_plain_server_says(
    servers: ServerPool,
    tiny_models: TinyModels,
    tmp_path: Path,
    family: str,
    request: pytest.FixtureRequest,
) -> None:
    """The chains of gpt-oss and DeepSeek-V3, which are upstream's, with `--slow`."""
    target = families.write_family(tmp_path / family, family)
    models = TinyModels(target, tiny_models.drafter)
    requests = tiny_requests(16, seed=5)
    plain = [outcome(a) for a in servers.get(*models.plain()).generate_all(requests)]
    if family == "qwen3_moe" or request.config.getoption("--slow"):
        chains = servers.get(*dflash(models)).generate_all(requests, at_once=8)
        assert [outcome(a) for a in chains] == plain
    server = servers.get(*models.ddtree(WIDTH))
    trees = server.generate_all(requests)
    assert [outcome(a) for a in trees] == plain
    assert mean_accept_length(trees) > 1
    # Again, in mixed batches and from the radix cache.
    trees = server.generate_all(requests, at_once=8, seed=1)
    assert [outcome(a) for a in trees] == plain
    assert max(a["meta_info"]["cached_tokens"] for a in trees) > 0


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", pytest.param("qwen2_moe", marks=pytest.mark.slow)]
)
def test_trees_say_what_the_plain_server_says(
    servers: ServerPool, tiny_models: TinyModels, tmp_path: Path, family: str
) -> None:
    """Upstream's DFLASH does not serve the last two."""
    target = families.write_family(tmp_path / family, family)
    models = TinyModels(target, tiny_models.drafter)
    requests = tiny_requests(16, seed=7)
    plain = servers.get(*models.plain()).generate_all(requests)
    trees = servers.get(*models.ddtree(33)).generate_all(requests, at_once=8)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
    assert mean_accept_length(trees) > 1


@pytest.mark.parametrize("write", [tiny.write_selector_drafter, tiny.write_domino_drafter])
def test_a_conditional_drafter_changes_no_token(
    servers: ServerPool, tiny_models: TinyModels, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    models = TinyModels(tiny_models.target, write(tmp_path / "drafter"))
    requests = tiny_requests(16, seed=6)
    plain = servers.get(*tiny_models.plain()).generate_all(requests)
    trees = servers.get(*models.ddtree(WIDTH)).generate_all(requests, at_once=8)
    assert [outcome(a) for a in trees] == [outcome(a) for a in plain]
    assert mean_accept_length(trees) > 1
