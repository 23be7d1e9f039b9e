"""Two tensor-parallel ranks on one CPU (gloo)."""

from __future__ import annotations

import os

import pytest

from .conftest import ServerPool, TinyModels, outcome, tiny_requests

pytestmark = pytest.mark.timeout(900)
# SGLang gives every CPU rank a NUMA node unless told which cores to use. Decisions are not
# broadcast from rank 0 either: ranks that disagreed would write different K/V and answer nonsense.
CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}",
    "SGLANG_SPEC_TP_SYNC": "off",
}


def test_two_ranks_draft_and_answer_like_one(
    servers: ServerPool, tiny_models: TinyModels, plain_answers
) -> None:
    """The plain server's tokens, in as many rounds as one rank takes.

    The vocabulary fits the first rank's rows of the head, so the second holds padding alone.
    """
    requests = tiny_requests(40)
    alone = servers.get(*tiny_models.ddtree(33)).generate_all(requests)
    server = servers.get(*tiny_models.ddtree(33, "--tp-size", "2"), environment=TWO_RANKS)
    answers = server.generate_all(requests)
    assert [outcome(a) for a in answers] == plain_answers["greedy"]
    assert [_rounds(a) for a in answers] == [_rounds(a) for a in alone]
    at_once = server.generate_all(requests, at_once=8)
    assert [outcome(a) for a in at_once] == plain_answers["greedy"]


def _rounds(answer: dict) -> int:
    return answer["meta_info"].get("spec_verify_ct", 0)  # absent where prefill was the end
