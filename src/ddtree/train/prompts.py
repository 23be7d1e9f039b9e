"""Prompts for training: from JSONL in the usual shapes, or written by the target itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree.accept import SamplingRule
from ddtree.train.generate import generate_responses

# What marks the place of the user's turn when the chat template is cut there.
_PROBE = "\u2063probe\u2063"
# Written instructions shorter or longer than this many tokens are seldom usable.
_INSTRUCTION_TOKENS = (4, 96)


class PromptError(ValueError):
    """Prompts cannot be read or written; the message names file and line."""


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user turn.

    Attributes:
        messages: `role` and `content` of each turn.
        source: a category, for reports and balance.
    """

    messages: tuple[dict[str, str], ...]
    source: str

    @classmethod
    def of_user(cls, text: str, source: str) -> Prompt:
        """A single user turn."""
        return cls(({"role": "user", "content": text},), source)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file.

    Each record may be a conversation (`messages`), a plain `prompt`, or a record of GSM8K
    (`question`), Spec-Bench and MT-Bench (`turns`; the first one counts) or HumanEval (`prompt`
    with `entry_point`).

    Raises:
        PromptError: the file cannot be read, or a record is of none of these shapes.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptError(f"the prompts {path} cannot be read ({error})") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_prompt_of(_parse(path, number, line), path, number))
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}, line {number} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise PromptError(f"{path}, line {number} is not a JSON object")
    return record


def _prompt_of(record: dict[str, Any], path: Path, number: int) -> Prompt:
    source = str(record.get("source") or record.get("category") or path.stem)
    if record.get("messages"):
        messages = [dict(m) for m in record["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return Prompt(tuple(messages), source)
    if record.get("turns"):
        return Prompt.of_user(record["turns"][0], source)
    for key in ("prompt", "question"):
        if record.get(key):
            return Prompt.of_user(record[key], source)
    raise PromptError(
        f"{path}, line {number} has none of messages, prompt, question, turns; "
        f"its keys are {sorted(record)}"
    )


def encode(tokenizer: Any, prompts: Iterable[Prompt]) -> list[list[int]]:
    """Token ids with the chat template, up to where the assistant begins."""
    return [
        tokenizer.apply_chat_template(
            list(p.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for p in prompts
    ]


def write_instructions(
    target: Any,
    tokenizer: Any,
    count: int,
    *,
    eos_token_ids: Sequence[int],
    seed: int = 0,
    rule: SamplingRule | None = None,
) -> list[Prompt]:
    """Let the target write instructions: the chat template is cut where the user would speak.

    Duplicates and texts of unusual length are dropped, so fewer than `count` may come back.
    """
    opening = user_opening(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    responses = generate_responses(
        target,
        [opening] * count,
        max_new_tokens=_INSTRUCTION_TOKENS[1],
        eos_token_ids=eos_token_ids,
        # A floor keeps texts sensible as top-p does, without sorting the vocabulary.
        rule=rule or SamplingRule(temperature=1.0, min_p=0.03),
        generator=generator,
    )
    texts: dict[str, None] = {}
    for response in responses:
        new = response.tokens[response.prompt_length :].tolist()
        ended = new[-1] in eos_token_ids
        text = tokenizer.decode(new, skip_special_tokens=True).strip()
        if ended and len(new) >= _INSTRUCTION_TOKENS[0] and text:
            texts[text] = None
    return [Prompt.of_user(text, "self") for text in texts]


def user_opening(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to the first word of the user.

    Raises:
        PromptError: the template does not contain the user's text as it is.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PROBE}], tokenize=False, add_generation_prompt=False
    )
    before, found, _ = text.partition(_PROBE)
    if not found or not before:
        raise PromptError(
            "the chat template gives no opening for a user turn; pass prompts instead"
        )
    return tokenizer.encode(before, add_special_tokens=False)
