"""Greedy DDTREE in fp32 says what the plain server says, token for token, whatever the load.

The tiny target's vocabulary is so small that an untrained drafter is often right: the tests also
assert that paths longer than the root were accepted, so that they cannot pass by never drafting.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.client
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import IN_STEP, RETRACTING, Server, ServerPool, TinyModels, outcome, tiny_requests

pytestmark = pytest.mark.timeout(600)


SMALL_POOL = (
    *("--max-total-tokens", "640", "--chunked-prefill-size", "128"),
    "--enable-priority-scheduling",
)


def mean_accept_length(answers: list[dict[str, Any]]) -> float:
    # An answer of one token needs no round.
    rounds = sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers)
    drafted = sum(a["meta_info"].get("spec_num_correct_drafts", 0) for a in answers)
    return 1 + drafted / max(rounds, 1)


@pytest.fixture(
    params=[
        pytest.param((33, ()), id="width33"),
        pytest.param((9, ("--page-size", "16")), id="width9-page16"),
        pytest.param((2, ("--chunked-prefill-size", "64")), id="width2-chunk64"),
        pytest.param((17, IN_STEP), id="width17-no-overlap"),
        pytest.param((17, ("--disable-radix-cache",)), id="width17-no-radix"),
    ],
    scope="module",
)
def ddtree(request: pytest.FixtureRequest, servers: ServerPool, tiny_models: TinyModels) -> Server:
    width, extra = request.param
    return servers.get(*tiny_models.ddtree(width, *extra))


def test_one_by_one(ddtree: Server, plain_answers: dict[str, list[Any]]) -> None:
    answers = ddtree.generate_all(tiny_requests(40)[:16])
    assert [outcome(a) for a in answers] == plain_answers["greedy"][:16]
    assert mean_accept_length(answers) > 1


def test_many_at_once_in_random_order(ddtree: Server, plain_answers: dict[str, list[Any]]) -> None:
    answers = ddtree.generate_all(tiny_requests(40), at_once=16, seed=1)
    assert [outcome(a) for a in answers] == plain_answers["greedy"]


def test_a_pool_so_small_that_requests_are_retracted(
    servers: ServerPool, tiny_models: TinyModels, plain_answers: dict[str, list[Any]]
) -> None:
    server = servers.get(*tiny_models.ddtree(17, *SMALL_POOL), environment=RETRACTING)
    answers = server.generate_all(tiny_requests(40), at_once=16, seed=2)
    assert [outcome(a) for a in answers] == plain_answers["greedy"]
    assert sum(a["meta_info"].get("num_retractions", 0) for a in answers) > 0


def test_urgent_requests_overtake_and_change_no_text(
    servers: ServerPool, tiny_models: TinyModels, plain_answers: dict[str, list[Any]]
) -> None:
    """Urgent requests overtake a crowd that fills the server."""
    server = servers.get(*tiny_models.ddtree(17, *SMALL_POOL), environment=RETRACTING)
    requests = tiny_requests(40)
    order = sorted(range(40), key=lambda i: -requests[i]["sampling_params"]["max_new_tokens"])
    crowd, urgent = order[:24], order[24:32]
    done: list[int] = []

    def ask(index: int) -> Any:
        priority = 100 if index in urgent else 0
        answer = server.generate(requests[index] | {"priority": priority})
        done.append(index)
        return outcome(answer)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = dict(zip(crowd + urgent, pool.map(ask, crowd + urgent), strict=True))
    assert [answers[i] for i in crowd + urgent] == [
        plain_answers["greedy"][i] for i in crowd + urgent
    ]
    assert set(done[-8:]) <= set(crowd), "urgent requests were left to the end"


def test_a_second_turn_that_reuses_the_first_turns_prefix(
    servers: ServerPool, tiny_models: TinyModels
) -> None:
    """The radix cache holds draft K/V too: same tokens and same tau as the same text sent cold."""
    server = servers.get(*tiny_models.ddtree(33))
    rng = random.Random(3)
    first_turns = [[rng.randrange(3, 20) for _ in range(80)] for _ in range(8)]
    sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    second_turns = []
    server.flush()
    for prompt in first_turns:
        answer = server.generate({"input_ids": prompt, "sampling_params": sampling})
        follow_up = [rng.randrange(3, 20) for _ in range(10)]
        second_turns.append(prompt + answer["output_ids"] + follow_up)
    requests = [{"input_ids": p, "sampling_params": sampling} for p in second_turns]
    warm = server.generate_all(requests)
    assert min(a["meta_info"]["cached_tokens"] for a in warm) >= 80 + 60
    cold = []
    for request in requests:
        server.flush()
        cold.append(server.generate(request))
    assert max(a["meta_info"]["cached_tokens"] for a in cold) == 0
    assert [outcome(a) for a in warm] == [outcome(a) for a in cold]
    # Not only close: the same draft K/V gives the same trees, up to the rounding of a prefill
    # against that of a verify forward.
    assert mean_accept_length(warm) == pytest.approx(mean_accept_length(cold), rel=0.03)


def test_a_request_may_fill_the_context_to_its_end(
    servers: ServerPool, tiny_models: TinyModels
) -> None:
    """Both reserved windows of the last rounds lie past the context length."""
    extra = ("--context-length", "160")
    prompt = [5, 9, 4, 17] * 25
    request = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    }
    plain = servers.get(*tiny_models.plain(*extra)).generate(request)
    tree = servers.get(*tiny_models.ddtree(33, *extra)).generate(request)
    assert outcome(tree) == outcome(plain)


def test_aborted_and_disconnected_clients_leave_no_slot_behind(
    servers: ServerPool, tiny_models: TinyModels
) -> None:
    """SGLang checks for leaked slots whenever it is idle, and stops when it finds one."""
    server = servers.get(*tiny_models.ddtree(33))
    rng = random.Random(4)
    for index in range(200):
        prompt = [rng.randrange(3, 23) for _ in range(rng.randrange(1, 60))]
        request = {
            "input_ids": prompt,
            "rid": f"abort-{index}",
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(request), headers)
        if index % 3:
            answer = connection.getresponse()
            for _ in range(rng.randrange(0, 8)):
                answer.readline()
        if index % 2:
            server.post("/abort_request", {"rid": request["rid"]})
        connection.close()
    server.generate_all(tiny_requests(4))
    _await_idle(server)
    assert server.alive, server.tail()
    assert "leak" not in server.log.read_text(encoding="utf-8", errors="replace").lower()


def _await_idle(server: Server) -> None:
    """Until the scheduler has said it is idle with no token in use, or it has died."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.alive:
        with contextlib.suppress(OSError):
            server.flush()
            return
        time.sleep(0.5)
    pytest.fail(f"the server never became idle:\n{server.tail()}")


def test_a_profile_names_the_operators_of_a_round(
    servers: ServerPool, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """SGLang asks a platform from outside which activity to record."""
    ddtree = servers.get(*tiny_models.ddtree(17, "--disable-radix-cache"))
    ddtree.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})
    ddtree.generate({"input_ids": [5, 9, 4], "sampling_params": {"max_new_tokens": 8}})
    ddtree.post("/stop_profile")
    (trace,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert "aten::scaled_dot_product_attention" in names
