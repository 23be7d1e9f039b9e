"""The default target behind the OpenAI-compatible API, plain and with trees, in fp32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, ServerPool, outcome

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def drafter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter, or an untrained one where none is shipped yet."""
    from transformers import AutoModelForCausalLM

    from ddtree.drafter import random_drafter, save_drafter
    from ddtree.drafter.shipped import shipped_drafter

    shipped = shipped_drafter()
    if shipped is not None:
        return Path(shipped)
    bound = random_drafter(AutoModelForCausalLM.from_pretrained(smollm2), block_size=8)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(bound.model, bound.config, folder)
    return folder


def _arguments(target: Path, *extra: str) -> tuple[str, ...]:
    return (
        *("--model-path", str(target), "--dtype", "float32", "--context-length", "2048"),
        *("--max-total-tokens", "8192", "--max-running-requests", "8", "--enable-metrics"),
        *extra,
    )


@pytest.fixture(scope="session")
def plain(servers: ServerPool, smollm2: Path) -> Server:
    return servers.get(*_arguments(smollm2))


@pytest.fixture(scope="session")
def ddtree(servers: ServerPool, smollm2: Path, drafter: Path) -> Server:
    return servers.get(
        *_arguments(
            smollm2,
            *("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "17"),
            *("--speculative-draft-model-path", str(drafter)),
        )
    )


def _requests(shared_data: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    lines = (shared_data / "spec_bench_a.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines[:count]]
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    return [{"text": prompt[:1500], "sampling_params": sampling} for prompt in prompts]


def test_greedy_text_equals_plain_decoding(
    plain: Server, ddtree: Server, shared_data: Path
) -> None:
    requests = _requests(shared_data, 8, 32)
    wanted = [outcome(a) for a in plain.generate_all(requests, at_once=4)]
    assert [outcome(a) for a in ddtree.generate_all(requests)] == wanted
    assert [outcome(a) for a in ddtree.generate_all(requests, at_once=8, seed=1)] == wanted


def test_stop_strings_end_inside_a_path(plain: Server, ddtree: Server, shared_data: Path) -> None:
    requests = [
        request | {"sampling_params": request["sampling_params"] | {"stop": stop}}
        for request in _requests(shared_data, 4, 48)
        for stop in ([". "], ["the", "\n"], ["and "])
    ]
    for ours, reference in zip(
        ddtree.generate_all(requests, at_once=6), plain.generate_all(requests, at_once=6),
        strict=True,
    ):  # fmt: skip
        assert ours["text"] == reference["text"]
        assert outcome(ours) == outcome(reference)


def test_no_stop_before_min_new_tokens(plain: Server, ddtree: Server) -> None:
    """Stop tokens are forbidden at exactly the nodes that would be too early."""
    requests = [
        {
            "text": f"<|im_start|>user\nSay only the word {word}.<|im_end|>\n"
            "<|im_start|>assistant\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 60, "min_new_tokens": least},
        }
        for word in ("yes", "seven", "Paris")
        for least in (9, 20)
    ]
    answers = ddtree.generate_all(requests, at_once=3)
    for request, answer in zip(requests, answers, strict=True):
        least = request["sampling_params"]["min_new_tokens"]
        assert answer["meta_info"]["completion_tokens"] > least
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain.generate_all(requests)]


@pytest.mark.parametrize(
    "grammar",
    [
        {"json_schema": json.dumps({"type": "object", "properties": {
            "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"]})},
        {"regex": "(red|green|blue)(, (red|green|blue)){3}"},
        {"ebnf": 'root ::= "yes" | "no, " [a-z]+ "."'},
    ],
    ids=lambda grammar: next(iter(grammar)),
)  # fmt: skip
def test_grammars_constrain_every_node(
    plain: Server, ddtree: Server, grammar: dict[str, str]
) -> None:
    requests = [
        {
            "text": f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n<|im_start|>assistant\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 48} | grammar,
        }
        for topic in ("a farmer", "the sky", "your favourite colours")
    ]
    wanted = [(a["text"], outcome(a)) for a in plain.generate_all(requests, at_once=3)]
    answers = ddtree.generate_all(requests, at_once=3)
    assert [(a["text"], outcome(a)) for a in answers] == wanted


def test_the_openai_client(ddtree: Server, plain: Server) -> None:
    """Chat, completion and streaming: the same text, and the same counts, as the plain server."""
    openai = pytest.importorskip("openai")
    clients = [
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        for server in (ddtree, plain)
    ]
    messages = [{"role": "user", "content": "Name three colours, with an emoji for each."}]
    chat: dict[str, Any] = {"model": "default", "messages": messages, "temperature": 0}
    answers = [client.chat.completions.create(**chat, max_tokens=40) for client in clients]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage
    stream = clients[0].chat.completions.create(**chat, max_tokens=40, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(pieces) == answers[1].choices[0].message.content
    texts = [
        client.completions.create(
            model="default", prompt="The capital of France is", max_tokens=12, temperature=0
        )
        for client in clients
    ]
    assert texts[0].choices[0].text == texts[1].choices[0].text


def test_accept_lengths_are_reported(ddtree: Server, shared_data: Path) -> None:
    """Per answer in `meta_info`, and for Prometheus."""
    (answer,) = ddtree.generate_all(_requests(shared_data, 1, 32))
    meta = answer["meta_info"]
    assert meta["spec_verify_ct"] >= 1
    drafted = meta["spec_num_correct_drafts"]
    assert meta["completion_tokens"] <= 1 + meta["spec_verify_ct"] + drafted
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(n * rounds for n, rounds in enumerate(histogram)) == drafted
    assert re.search(r"^sglang:spec_accept_length", ddtree.get("/metrics"), re.MULTILINE)
