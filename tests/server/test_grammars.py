"""Answers under grammars: every one is in the language, and is the plain server's.

CI asks for 24 under eight grammars; `--slow` for 200.

The model is random, so that nearly every token it would say by itself is forbidden. What the
default target says under grammars is in `test_default_model.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .conftest import Server, ServerPool, TinyModels, outcome
from .test_tree_equals_plain import mean_accept_length

pytestmark = pytest.mark.timeout(900)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "job": {"enum": ["farmer", "teacher", "engineer"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
SCORES = {
    "type": "array",
    "items": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    "minItems": 1,
    "maxItems": 2,
}
CALL = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
COLOURS = r"(red|green|blue)(, (red|green|blue)){3}"
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
# Each with a pattern of its own for what it stands for.
SUM = ('root ::= number (" + " number){1,3} " = " number\nnumber ::= [1-9] [0-9]?',
       r"[1-9][0-9]?( \+ [1-9][0-9]?){1,3} = [1-9][0-9]?")  # fmt: skip
VERDICT = ('root ::= "yes" | "no, " [a-z]{1,8} "."', r"yes|no, [a-z]{1,8}\.")
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": CALL},
        "end": "</call>",
    },
}
TRIGGERED_TAG = {  # in the form of SGLang's older clients
    "structures": [{"begin": "<weather>", "schema": CALL, "end": "</weather>"}],
    "triggers": ["<weather>"],
    "at_least_one": True,
}

TOPICS = (
    "a farmer in Norway", "the sky", "your favourite colours", "Paris", "a cat on a roof",
    "the sum of two and three", "a wedding in May", "the moon landing", "bread", "a teacher",
    "Marie Curie", "a train to Oslo", "the weather", "a school day", "chess", "gold", "rain",
    "an engineer who sings", "the year 1999", "a broken clock", "Lima", "tea", "a red house",
    "my neighbour", "a long walk",
)  # fmt: skip


def is_json(text: str, schema: dict[str, Any]) -> bool:
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_tagged(text: str, name: str) -> bool:
    """Whether the text holds one finished call or more, all well-formed."""
    calls = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return len(calls) > 0 and all(is_json(c, CALL) for c in calls)


GRAMMARS = {
    "json-person": ({"json_schema": json.dumps(PERSON)}, lambda text: is_json(text, PERSON)),
    "json-array": ({"json_schema": json.dumps(SCORES)}, lambda text: is_json(text, SCORES)),
    "regex-colours": ({"regex": COLOURS}, re.compile(COLOURS).fullmatch),
    "regex-date": ({"regex": DATE}, re.compile(DATE).fullmatch),
    "ebnf-sum": ({"ebnf": SUM[0]}, re.compile(SUM[1]).fullmatch),
    "ebnf-verdict": ({"ebnf": VERDICT[0]}, re.compile(VERDICT[1]).fullmatch),
    "tag": ({"structural_tag": json.dumps(TAG)}, lambda text: is_tagged(text, "call")),
    "tag-triggered": (
        {"structural_tag": json.dumps(TRIGGERED_TAG)},
        lambda text: is_tagged(text, "weather"),
    ),
}


def requests_under(grammar: dict[str, str], topics: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "text": f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n<|im_start|>assistant\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 200} | grammar,
        }
        for topic in topics
    ]


@pytest.mark.parametrize("kind", ["json", "regex", "ebnf", "tag"])
def test_generations_under_grammars(
    text_plain: Server, text_ddtree: Server, kind: str, request: pytest.FixtureRequest
) -> None:
    """Requests with different grammars and with none share the batches."""
    topics = TOPICS if request.config.getoption("--slow") else TOPICS[:3]
    asked = [
        (name, one, valid)
        for name, (grammar, valid) in GRAMMARS.items()
        if name.startswith(kind)
        for one in requests_under(grammar, topics)
    ]
    requests = [one for _, one, _ in asked] + requests_under({}, topics[:10])
    wanted = text_plain.generate_all(requests, at_once=8)
    answers = text_ddtree.generate_all(requests, at_once=8, seed=3)
    assert [(a["text"], outcome(a)) for a in answers] == [(a["text"], outcome(a)) for a in wanted]
    assert len(asked) == 2 * len(topics)
    for (name, _, valid), answer in zip(asked, answers, strict=False):
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            # The older kind of tags allows text and calls without end, so the answer may be cut.
            assert name == "tag-triggered"
            assert valid(answer["text"]) or "</weather>" not in answer["text"]
        else:
            assert valid(answer["text"]), answer["text"]


def test_a_tree_holds_no_node_that_the_grammar_forbids(text_ddtree: Server) -> None:
    """Where only one text is possible, its tokens are drafted whatever the drafter thinks."""
    forced = {"regex": "the tree of the drafter, the path of the target"}
    (answer,) = text_ddtree.generate_all(requests_under(forced, TOPICS[:1]))
    meta = answer["meta_info"]
    assert answer["text"] == forced["regex"]
    assert meta["completion_tokens"] / meta["spec_verify_ct"] > 2


@pytest.mark.parametrize(
    "write",
    [tiny.write_selector_drafter, pytest.param(tiny.write_domino_drafter, marks=pytest.mark.slow)],
)
def test_a_conditional_drafter_under_grammars(
    servers: ServerPool,
    text_models: TinyModels,
    text_plain: Server,
    tmp_path: Path,
    write: Callable[..., Path],
) -> None:
    drafter = write(tmp_path / "drafter", vocabulary=300)
    models = replace(text_models, drafter=drafter)
    requests = [
        one for grammar, _ in GRAMMARS.values() for one in requests_under(grammar, TOPICS[:1])
    ] + requests_under({}, TOPICS[:4])
    wanted = text_plain.generate_all(requests, at_once=8)
    answers = servers.get(*models.ddtree(17)).generate_all(requests, at_once=8, seed=4)
    assert [(a["text"], outcome(a)) for a in answers] == [(a["text"], outcome(a)) for a in wanted]
    assert mean_accept_length(answers) > 1


def test_sampled_answers_are_in_the_language(text_ddtree: Server) -> None:
    grammar, valid = GRAMMARS["regex-colours"]
    requests = requests_under(grammar | {"temperature": 1.5}, TOPICS[:8])
    for answer in text_ddtree.generate_all(requests, at_once=4):
        assert valid(answer["text"]), answer["text"]
