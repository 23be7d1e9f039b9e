"""What a client reads: streamed characters, stop strings, grammars, in random combinations.

`test_fuzz.py` sends token ids to a model without a tokenizer; here the requests are text.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
from typing import Any

import pytest

from .conftest import Server, outcome
from .test_grammars import GRAMMARS, TOPICS

pytestmark = pytest.mark.timeout(900)
AT_ONCE = 8


def events_of(server: Server, request: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post("/generate", request | {"stream": True}).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def ask(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """An answer, streamed where the request says so; what was streamed is never taken back."""
    if not request.get("stream"):
        return server.generate(request)
    events = events_of(server, request)
    for event in events:
        assert events[-1]["text"].startswith(event["text"]), "a streamed piece was taken back"
    return events[-1]


@pytest.mark.parametrize(
    "rule",
    [
        {"regex": "[\u4e00-\u9fa5]{8}"},
        {"regex": "(\U0001f332|\U0001f600|\U0001f9d1\u200d\U0001f680|\u00e9|\u20ac){6}"},
        {},
    ],
    ids=["chinese", "emoji", "free"],
)
def test_characters_of_several_tokens_arrive_whole(
    text_plain: Server, text_ddtree: Server, rule: dict[str, str]
) -> None:
    """The tokenizer spells such characters in bytes, and a round may end between two of them."""
    requests = [
        {
            "text": f"<|im_start|>user\nRepeat: {text}<|im_end|>\n<|im_start|>assistant\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 32} | rule,
        }
        for text in (
            "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
            "\U0001f332\U0001f600 caf\u00e9 \u20ac",
        )
    ]
    wanted = text_plain.generate_all(requests, at_once=2)
    for request, reference in zip(requests, wanted, strict=True):
        events = events_of(text_ddtree, request)
        assert outcome(events[-1]) == outcome(reference)
        assert events[-1]["text"] == reference["text"]
        for event in events:
            assert reference["text"].startswith(event["text"]), "half a character was sent"
        if rule:
            assert len(reference["text"].encode()) > len(reference["text"])
            assert len(reference["output_ids"]) > len(reference["text"])


def random_request(rng: random.Random) -> dict[str, Any]:
    """A text request under a random grammar or none, with stop strings, streamed or not."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": rng.choice([3, 10, 40, 100])}
    if rng.random() < 0.5:
        sampling |= rng.choice(list(GRAMMARS.values()))[0]
    elif rng.random() < 0.4:
        sampling["min_new_tokens"] = 2
    if rng.random() < 0.4:
        sampling["stop"] = rng.sample([". ", ",", "e", "the", "\n", ' "', "1", "blue"], 2)
    if rng.random() < 0.2:
        sampling["no_stop_trim"] = True
    if rng.random() < 0.2:
        sampling["logit_bias"] = {str(rng.randrange(300)): 3.0}
    if rng.random() < 0.2:
        sampling |= {"temperature": 0.8, "top_k": 1}  # greedy by another name
    prompt = f"<|im_start|>user\nTell me about {rng.choice(TOPICS)}.<|im_end|>\n"
    request = {"text": f"{prompt}<|im_start|>assistant\n", "sampling_params": sampling}
    if rng.random() < 0.3:
        request["stream"] = True
    elif rng.random() < 0.3:
        request["return_logprob"] = True
    return request


def test_random_requests_of_text(text_plain: Server, text_ddtree: Server) -> None:
    rng = random.Random(20261202)
    requests = [random_request(rng) for _ in range(300)]
    said = []
    for server in (text_plain, text_ddtree):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            said.append(list(pool.map(lambda one, server=server: ask(server, one), requests)))
    for one, reference, answer in zip(requests, *said, strict=True):
        assert answer["text"] == reference["text"], one
        assert outcome(answer) == outcome(reference), one
        if one.get("return_logprob") and one["sampling_params"]["temperature"] == 0:
            pairs = zip(
                answer["meta_info"]["output_token_logprobs"],
                reference["meta_info"]["output_token_logprobs"],
                strict=True,
            )
            for (value, token, *_), (wanted, same, *_) in pairs:
                assert token == same, one
                assert value == pytest.approx(wanted, abs=1e-4), one
