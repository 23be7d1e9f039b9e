"""Preparing data: prompts in, the target's greedy responses and features out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree.train.generate import generate_responses
from ddtree.train.prompts import Prompt, encode
from ddtree.train.sources import target_features
from ddtree.train.store import Document, StoreWriter


def prepare_prompts(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    layer_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    batch_size: int = 96,
    max_prompt_tokens: int = 1024,
    progress: Callable[[int, int, float], None] | None = None,
) -> int:
    """Generate greedy responses and store them with their features.

    Prompts longer than `max_prompt_tokens` are left out.

    Args:
        out: folder of the feature store; it also receives `responses.jsonl`.
        progress: called with documents done, documents wanted, tokens per second.
    Returns:
        Number of documents stored.
    """
    encoded = encode(tokenizer, prompts)
    kept = [i for i, ids in enumerate(encoded) if len(ids) <= max_prompt_tokens]
    hidden = target.config.get_text_config().hidden_size
    writer = StoreWriter(out, layer_ids=layer_ids, hidden_size=hidden)
    began, tokens, done = time.perf_counter(), 0, 0
    responses = generate_responses(
        target,
        [encoded[i] for i in kept],
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        layer_ids=layer_ids,
        batch_size=batch_size,
    )
    with (Path(out) / "responses.jsonl").open("a", encoding="utf-8") as lines:
        for response in responses:
            prompt = prompts[kept[response.index]]
            writer.add(
                Document(response.tokens, response.prompt_length, response.features, prompt.source)
            )
            lines.write(json.dumps(_record(prompt, response)) + "\n")
            done, tokens = done + 1, tokens + len(response.tokens) - response.prompt_length
            if progress is not None:
                progress(done, len(kept), tokens / (time.perf_counter() - began))
    writer.flush()
    return done


def _record(prompt: Prompt, response) -> dict[str, Any]:
    tokens, start = response.tokens.tolist(), response.prompt_length
    return {
        "source": prompt.source,
        "prompt": prompt.messages[-1]["content"],
        "prompt_ids": tokens[:start],
        "response_ids": tokens[start:],
    }


@torch.no_grad()
def prepare_responses(
    target: Any,
    records: Sequence[dict[str, Any]],
    out: str | Path,
    *,
    layer_ids: Sequence[int],
    max_response_tokens: int,
    progress: Callable[[int, int, float], None] | None = None,
) -> int:
    """Store known responses (`prompt_ids`, `response_ids`) with their features.

    Args:
        max_response_tokens: longer responses are cut.
    Returns:
        Number of documents stored.
    """
    hidden = target.config.get_text_config().hidden_size
    writer = StoreWriter(out, layer_ids=layer_ids, hidden_size=hidden)
    began, seen = time.perf_counter(), 0
    for number, record in enumerate(records, 1):
        tokens = record["prompt_ids"] + record["response_ids"][:max_response_tokens]
        ids = torch.tensor(tokens)
        features = target_features(target, ids[None, :-1], layer_ids)[0].to(torch.bfloat16)
        source = record.get("source", "unnamed")
        writer.add(Document(ids, len(record["prompt_ids"]), features.cpu(), source))
        seen += len(ids)
        if progress is not None:
            progress(number, len(records), seen / (time.perf_counter() - began))
    writer.flush()
    return len(records)


def eos_ids(target: Any) -> list[int]:
    """The target's end-of-response tokens, from its generation configuration."""
    ids = target.generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def threads_available() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
