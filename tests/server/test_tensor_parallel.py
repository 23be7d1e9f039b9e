"""Two tensor-parallel ranks on one CPU (gloo)."""

from __future__ import annotations

import pytest

from .conftest import ServerPool, TinyModels, outcome, tiny_requests

# SGLang gives every CPU rank a NUMA node unless told which cores to use. Decisions are not
# broadcast from rank 0 either: ranks that disagreed would write different K/V and answer nonsense.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_SPEC_TP_SYNC": "off"}


@pytest.mark.parametrize("width", [9, 33])
def test_two_ranks_build_the_same_trees_and_answer_like_one_plain_device(
    servers: ServerPool, tiny_models: TinyModels, plain_answers, width: int
) -> None:
    server = servers.get(*tiny_models.ddtree(width, "--tp-size", "2"), environment=TWO_RANKS)
    answers = server.generate_all(tiny_requests(40), at_once=8)
    assert [outcome(a) for a in answers] == plain_answers["greedy"]
    rounds = sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers)
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    assert tokens > 1.3 * rounds, "the trees are hardly ever accepted"
