"""What a request may ask for keeps its meaning on a tree: sampling, penalties, logprobs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from . import tiny
from .conftest import IN_STEP, Server, ServerPool, TinyModels, outcome, tiny_requests

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def plain(servers: ServerPool, tiny_models: TinyModels) -> Server:
    """Under overlap scheduling the plain server's penalties lag one token behind its output."""
    return servers.get(*tiny_models.exact_plain())


@pytest.fixture(scope="module")
def ddtree(servers: ServerPool, tiny_models: TinyModels) -> Server:
    return servers.get(*tiny_models.ddtree(33))


@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2, "top_p": 0.9},
    ],
    ids=lambda rule: "-".join(rule),
)
def test_sampled_tokens_have_the_plain_servers_distribution(
    plain: Server, ddtree: Server, rule: dict[str, float]
) -> None:
    """Two-sample chi-square over the joint distribution of the second and third token.

    The first token comes from the prefill; the others from trees.
    """
    from scipy.stats import chi2_contingency

    request = {
        "input_ids": [5, 9, 4, 17, 3],
        "sampling_params": rule | {"max_new_tokens": 3, "ignore_eos": True, "n": 750},
    }
    counts = [Counter(_second_and_third(server, request)) for server in (plain, ddtree)]
    pairs = sorted(counts[0].keys() | counts[1].keys())
    frequent = [p for p in pairs if counts[0][p] + counts[1][p] >= 20]
    table = [[c[p] for p in frequent] + [c.total() - sum(c[p] for p in frequent)] for c in counts]
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    assert len(columns) > 3, "too few outcomes to tell distributions apart"
    p_value = chi2_contingency(list(zip(*columns, strict=True))).pvalue
    assert p_value > 1e-4


def _second_and_third(server: Server, request: dict[str, Any]) -> list[tuple[int, ...]]:
    answers: Any = server.generate(request)
    return [tuple(answer["output_ids"][1:3]) for answer in answers]


def test_greedy_and_sampling_requests_in_one_batch(
    ddtree: Server, plain_answers: dict[str, list[Any]]
) -> None:
    """A greedy request is greedy whatever its neighbours do."""
    greedy = tiny_requests(40)[:12]
    noise = tiny_requests(12, seed=9, temperature=1.3, top_p=0.8)
    mixed = [request for pair in zip(greedy, noise, strict=True) for request in pair]
    answers = ddtree.generate_all(mixed, at_once=8, seed=5)
    assert [outcome(a) for a in answers[::2]] == plain_answers["greedy"][:12]


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.3},
        # Not with repetition_penalty: SGLang applies the two kinds in the order of a set.
        {"frequency_penalty": -0.4, "presence_penalty": 0.5},
        {"logit_bias": {"7": 4.0, "13": -6.0}},
    ],
    ids=lambda penalties: "-".join(penalties),
)
def test_penalties_see_the_path_to_the_node(
    plain: Server, ddtree: Server, penalties: dict[str, Any]
) -> None:
    """Greedy output under penalties equals the plain server's, alone and in a mixed batch."""
    penalised = tiny_requests(8, seed=11, **penalties)
    wanted = [outcome(a) for a in plain.generate_all(penalised)]
    assert [outcome(a) for a in ddtree.generate_all(penalised)] == wanted
    mixed = penalised + tiny_requests(8, seed=12)
    answers = ddtree.generate_all(mixed, at_once=8, seed=6)
    assert [outcome(a) for a in answers[:8]] == wanted


def test_log_probabilities_of_accepted_nodes(plain: Server, ddtree: Server) -> None:
    """Chosen, top and input log-probabilities, in accepted order, none missing or extra."""
    requests = [
        request | {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
        for request in tiny_requests(10, seed=13)
    ]
    wanted = plain.generate_all(requests)
    for at_once in (1, 5):
        answers = ddtree.generate_all(requests, at_once=at_once)
        for answer, reference in zip(answers, wanted, strict=True):
            assert outcome(answer) == outcome(reference)
            for kind in ("output_token_logprobs", "input_token_logprobs"):
                _assert_close(answer["meta_info"][kind], reference["meta_info"][kind])
            tops = [a["meta_info"]["output_top_logprobs"] for a in (answer, reference)]
            assert len(tops[0]) == len(tops[1])
            for ours, theirs in zip(*tops, strict=True):
                _assert_close(ours, theirs)


def _assert_close(ours: list[Any], theirs: list[Any]) -> None:
    assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
    for (value, *_), (reference, *_) in zip(ours, theirs, strict=True):
        if reference is None:
            assert value is None
        else:
            assert value == pytest.approx(reference, abs=1e-4)


def test_tokens_with_special_ids_are_ordinary_output(plain: Server, ddtree: Server) -> None:
    """Token id 0 is no empty node, and the drafter's mask token may be said."""
    bias = {"0": 4.0, str(tiny.MASK_TOKEN_ID): 4.0}
    requests = tiny_requests(8, seed=14, logit_bias=bias, max_new_tokens=40, ignore_eos=True)
    wanted = [outcome(a) for a in plain.generate_all(requests)]
    said = Counter(token for tokens, *_ in wanted for token in tokens)
    assert said[0] > 5
    assert said[tiny.MASK_TOKEN_ID] > 5
    assert [outcome(a) for a in ddtree.generate_all(requests)] == wanted


def test_n_answers_of_a_greedy_request_are_the_same_answer(plain: Server, ddtree: Server) -> None:
    requests = tiny_requests(6, seed=15)
    wanted = [outcome(a) for a in plain.generate_all(requests)]
    for request, one in zip(requests, wanted, strict=True):
        request["sampling_params"]["n"] = 3
        answers: Any = ddtree.generate(request)
        assert [outcome(answer) for answer in answers] == [one] * 3


def test_sessions_continue_where_they_were(plain: Server, ddtree: Server) -> None:
    """Three turns of a session; the third one branches off from the first."""
    said = []
    for server in (plain, ddtree):
        session = json.loads(server.post("/open_session", {"capacity_of_str_len": 2000}))
        answers = []
        for turn, request in enumerate(tiny_requests(3, seed=16, max_new_tokens=40)):
            place = {"id": session}
            if answers:
                place["rid"] = answers[0 if turn == 2 else -1]["meta_info"]["id"]
            answers.append(server.generate(request | {"session_params": place}))
        server.post("/close_session", {"session_id": session})
        said.append([(outcome(a), a["meta_info"]["prompt_tokens"]) for a in answers])
    assert said[1] == said[0]
    assert said[0][1][1] > said[0][0][1] + len(said[0][0][0][0]), "the turn before was not kept"


# Sent by value, as a client's own script sends its processor: the server has no such module.
PROCESSORS = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class OnlyEven(CustomLogitProcessor):
    "Knows no more than its parameters."
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            logits[row, params["first"] :: 2] = float("-inf")
        return logits

class NoRecentToken(CustomLogitProcessor):
    "Reads its request's output: a token may not come again within three."
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            logits[row, list(params["__req__"].output_ids[-3:])] = float("-inf")
        return logits
"""


@pytest.mark.parametrize("name", ["OnlyEven", "NoRecentToken"])
def test_custom_logit_processors_see_the_path_to_the_node(
    plain: Server, servers: ServerPool, tiny_models: TinyModels, name: str
) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(PROCESSORS, script)
    custom = {"custom_logit_processor": script[name].to_str()}
    requests = [
        request | custom for request in tiny_requests(8, seed=17, custom_params={"first": 1})
    ]
    wanted = [outcome(a) for a in plain.generate_all(requests)]
    tokens = [token for ids, *_ in wanted for token in ids]
    assert tokens if name == "NoRecentToken" else not any(token % 2 for token in tokens)
    server = servers.get(*tiny_models.ddtree(17, *IN_STEP))
    assert [outcome(a) for a in server.generate_all(requests)] == wanted
    mixed = requests + tiny_requests(8, seed=18)
    assert [outcome(a) for a in server.generate_all(mixed, at_once=8, seed=7)][:8] == wanted
