"""The default target behind the OpenAI-compatible API, plain and with trees.

CI runs a slice of the studies of whole prompt sets; `--slow` runs them in full.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import read_jsonl

from .conftest import Server, ServerPool, default_arguments, outcome, rounds_by_arm

pytestmark = pytest.mark.timeout(900)
# Separates rounding from faults for this target (docs/structure.md, "Losslessness").
REGRET = 0.3


@pytest.fixture(scope="session")
def plain(default_plain: Server) -> Server:
    return default_plain


@pytest.fixture(scope="session")
def ddtree(default_ddtree: Server) -> Server:
    return default_ddtree


@pytest.fixture(scope="session")
def auto(servers: ServerPool, smollm2: Path, drafter: Path) -> Server:
    """The controller itself, with room for trees of 33."""
    return servers.get(
        *default_arguments(
            smollm2,
            *("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "33"),
            *("--speculative-draft-model-path", str(drafter)),
        ),
        environment={"DDTREE_BUDGET": "auto"},
    )


def _requests(shared_data: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy requests spread over Spec-Bench, whose categories follow one another."""
    records = read_jsonl(shared_data / "spec_bench_a.jsonl")
    prompts = [record["turns"][0] for record in records[:: len(records) // count][:count]]
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    return [{"text": prompt[:1500], "sampling_params": sampling} for prompt in prompts]


def test_greedy_text_equals_plain_decoding(
    plain: Server, ddtree: Server, shared_data: Path
) -> None:
    requests = _requests(shared_data, 8, 32)
    wanted = [outcome(a) for a in plain.generate_all(requests, at_once=4)]
    assert [outcome(a) for a in ddtree.generate_all(requests)] == wanted
    assert [outcome(a) for a in ddtree.generate_all(requests, at_once=8, seed=1)] == wanted


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("width", [2, 9, 33])
def test_forty_prompts_equal_plain_decoding(
    plain: Server, ddtree_at, shared_data: Path, width: int
) -> None:
    """One by one, and 16 at once in random order with different lengths and stop conditions."""
    requests = _requests(shared_data, 40, 64)
    for index, request in enumerate(requests[:16]):
        own = {"max_new_tokens": 16 + 3 * index, "stop": ["\n\n", ". ", "zzz"][index % 3]}
        requests[index] = request | {"sampling_params": request["sampling_params"] | own}
    wanted = [outcome(a) for a in plain.generate_all(requests)]
    server = ddtree_at(width)
    assert [outcome(a) for a in server.generate_all(requests)] == wanted
    at_once = server.generate_all(requests[:16], at_once=16, seed=2)
    assert [outcome(a) for a in at_once] == wanted[:16]


def test_tau_is_the_reference_engines(
    ddtree: Server, smollm2: Path, drafter: Path, shared_data: Path, request
) -> None:
    """Committed tokens per round over the same prompts, within 3 %."""
    from ddtree.drafter import load_drafter
    from ddtree.engine import generate, load_target

    target, tokenizer = load_target(smollm2, dtype=torch.float32)
    bound = load_drafter(drafter, target=target)
    slow = request.config.getoption("--slow")
    requests = _requests(shared_data, 24 if slow else 3, 64 if slow else 32)
    served = [a["meta_info"] for a in ddtree.generate_all(requests)]
    rounds = tokens = 0
    for one in requests:
        count = one["sampling_params"]["max_new_tokens"]
        prompt = tokenizer.encode(one["text"])
        result = generate(target, bound, prompt, mode="ddtree", budget=16, max_new_tokens=count)
        rounds, tokens = rounds + len(result.accept_lengths), tokens + len(result.tokens)
    # A request that its first token ends has no round.
    ours = sum(m["completion_tokens"] for m in served) / sum(
        m.get("spec_verify_ct", 0) for m in served
    )
    assert ours == pytest.approx(tokens / rounds, rel=0.03)


def test_bfloat16_regret_is_rounding(ddtree_at, smollm2: Path, shared_data: Path, request) -> None:
    """Every committed token is within REGRET of the best by a float32 forward of its prefix."""
    from ddtree.engine import load_target

    slow = request.config.getoption("--slow")
    requests = _requests(shared_data, 24 if slow else 4, 64 if slow else 24)
    answers = ddtree_at(17, "bfloat16").generate_all(requests, at_once=4)
    target, tokenizer = load_target(smollm2, dtype=torch.float32)
    for index, (one, answer) in enumerate(zip(requests, answers, strict=True)):
        prompt, chosen = tokenizer.encode(one["text"]), torch.tensor(answer["output_ids"])
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + chosen.tolist()])).logits[
                0, len(prompt) - 1 : -1
            ]
        picked = logits.gather(1, chosen[:, None])[:, 0]
        assert float((logits.amax(-1) - picked).max()) <= REGRET, f"prompt {index}"


def test_stop_strings_end_inside_a_path(plain: Server, ddtree: Server, shared_data: Path) -> None:
    requests = [
        request | {"sampling_params": request["sampling_params"] | {"stop": stop}}
        for request in _requests(shared_data, 4, 48)
        for stop in ([". "], ["the", "\n"], ["and ", "e", "a"])
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


def test_a_chosen_budget_changes_no_text(plain: Server, auto: Server, shared_data: Path) -> None:
    """Few and many requests, with and without a grammar; the widths used are reported."""
    free = _requests(shared_data, 6, 32)
    bound = [
        request | {"sampling_params": request["sampling_params"] | {"regex": "[a-z ]{20,30}[.!]"}}
        for request in free[:2]
    ]
    requests = free + bound
    wanted = [outcome(a) for a in plain.generate_all(requests, at_once=4)]
    answers = auto.generate_all(requests[:1]) + auto.generate_all(requests[1:], at_once=7)
    assert [outcome(a) for a in answers] == wanted
    rounds = rounds_by_arm(auto)
    assert sum(rounds.values()) >= max(a["meta_info"]["spec_verify_ct"] for a in answers)
    # The first rounds look at the drafter whatever comes of it.
    assert any(arm.startswith("tree") for arm in rounds)


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


def test_the_curl_lines_of_the_readme(ddtree: Server) -> None:
    """Each runs as it stands, but for the port."""
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (curl http.*?(?:\\\n.*?)*)$", readme, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        here = command.replace("http://127.0.0.1:30000", ddtree.url)
        answer = subprocess.run(["sh", "-c", here], capture_output=True, text=True, check=True)
        body = json.loads(answer.stdout)
        if "meta_info" in body:
            assert body["text"]
            assert body["meta_info"]["spec_accept_length"] >= 1
        else:
            choice = body["choices"][0]
            assert choice.get("text") or choice["message"]["content"]


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
