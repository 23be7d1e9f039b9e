"""Streaming requests to an SGLang server (`/generate`) or to any OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from ddtree.bench.answers import Answer, Visit
from ddtree.bench.plan import BenchError, Cell, Plan
from ddtree.train.prompts import Prompt

_TIMEOUT = httpx.Timeout(30, read=1800)
_DATA, _DONE = "data: ", "[DONE]"


class SGLangClient:
    """Token ids in and out, so that outputs can be compared and scored.

    Args:
        url: of the server.
        prompts: what is asked.
        tokenizer: applies the target's chat template.
    """

    can_score = True

    def __init__(self, url: str, prompts: Sequence[Prompt], tokenizer: Any) -> None:
        self.url = url
        self._prompts = prompts
        self._tokenizer = tokenizer

    def info(self) -> dict[str, Any]:
        """The server's own description."""
        return httpx.get(f"{self.url}/server_info", timeout=_TIMEOUT).raise_for_status().json()

    def flush(self) -> None:
        """Empty the radix cache; waits for the server to be idle."""
        url = f"{self.url}/flush_cache"
        answer = httpx.post(url, params={"timeout": 30}, timeout=_TIMEOUT)
        if answer.is_error:
            raise BenchError(f"{self.url} did not flush its cache: {answer.text.strip()}")

    def prompt_ids(self, prompt: int, cell: Cell) -> list[int]:
        """The prompt in the target's chat template."""
        return chat_ids(self._tokenizer, self._prompts[prompt], cell)

    def payload(self, prompt: int, cell: Cell, plan: Plan) -> tuple[str, dict[str, Any]]:
        """Path and body of one request."""
        sampling = {
            "temperature": cell.temperature,
            "max_new_tokens": plan.max_new_tokens,
            "ignore_eos": plan.ignore_eos,
        }
        ids = self.prompt_ids(prompt, cell)
        return "/generate", {"input_ids": ids, "sampling_params": sampling, "stream": True}

    def answer(self, prompt: int, events: list[tuple[float, dict[str, Any]]]) -> Answer:
        """Events carry everything so far, so the last one is the answer."""
        (first_at, first), (last_at, last) = events[0], events[-1]
        meta = last["meta_info"]
        return Answer(
            prompt=prompt,
            tokens=last["output_ids"],
            text=last.get("text", ""),
            count=meta["completion_tokens"],
            first_count=first["meta_info"]["completion_tokens"],
            first_seconds=first_at,
            seconds=last_at,
            histogram=_histogram(meta),
        )

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        """See `Backend.regrets`; one prefill."""
        ids = self.prompt_ids(prompt, cell)
        body = {
            "input_ids": ids + tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": max(len(ids) - 1, 0),
            "top_logprobs_num": 1,
        }
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=_TIMEOUT).raise_for_status()
        meta = answer.json()["meta_info"]
        chosen = meta["input_token_logprobs"][-len(tokens) :]
        best = meta["input_top_logprobs"][-len(tokens) :]
        return [top[0][0] - one[0] for one, top in zip(chosen, best, strict=True)]


class OpenAIClient:
    """Text in and out through `/v1/chat/completions`; no rounds, no scores."""

    can_score = False

    def __init__(self, url: str, prompts: Sequence[Prompt]) -> None:
        self.url = url
        self._prompts = prompts
        self._model: str | None = None

    def info(self) -> dict[str, Any]:
        """The models it lists."""
        return httpx.get(f"{self.url}/v1/models", timeout=_TIMEOUT).raise_for_status().json()

    def flush(self) -> None:
        """The interface has no such call."""

    def payload(self, prompt: int, cell: Cell, plan: Plan) -> tuple[str, dict[str, Any]]:
        """Path and body of one request."""
        if self._model is None:
            self._model = self.info()["data"][0]["id"]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(self._prompts[prompt].messages),
            "temperature": cell.temperature,
            "max_tokens": plan.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if cell.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": cell.thinking}
        return "/v1/chat/completions", body

    def answer(self, prompt: int, events: list[tuple[float, dict[str, Any]]]) -> Answer:
        """Events carry what is new; the usage comes last."""
        said = [(at, _said(event)) for at, event in events if _said(event)]
        usage = next((event["usage"] for _, event in events[::-1] if event.get("usage")), None)
        if usage is None:
            raise BenchError(f"{self.url} reports no usage, so its tokens cannot be counted")
        first_at, last_at = (said[0][0], said[-1][0]) if said else (events[-1][0],) * 2
        return Answer(
            prompt=prompt,
            tokens=None,
            text="".join(text for _, text in said),
            count=usage["completion_tokens"],
            first_count=1,
            first_seconds=first_at,
            seconds=last_at,
        )

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        """Not part of the interface."""
        raise BenchError(f"{self.url} cannot score outputs; only SGLang servers can")


Client = SGLangClient | OpenAIClient


def _histogram(meta: dict[str, Any]) -> dict[int, int] | None:
    if "spec_verify_ct" not in meta:  # plain decoding: a round per token after the prefill's
        return {1: meta["completion_tokens"] - 1}
    drafted = meta.get("spec_correct_drafts_histogram")
    # The server counts drafted tokens; the target's own comes on top.
    return {n + 1: rounds for n, rounds in enumerate(drafted) if rounds} if drafted else None


def _said(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def chat_ids(tokenizer: Any, prompt: Prompt, cell: Cell) -> list[int]:
    """Token ids of a prompt up to where the assistant begins.

    Raises:
        BenchError: thinking is asked for and the template does not know it.
    """
    extra = {}
    if cell.thinking is not None:
        if "enable_thinking" not in str(tokenizer.chat_template):
            raise BenchError(
                "the target's chat template has no enable_thinking; leave --thinking out"
            )
        extra["enable_thinking"] = cell.thinking
    return tokenizer.apply_chat_template(
        list(prompt.messages), add_generation_prompt=True, return_dict=False, **extra
    )


def ask(client: Client, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
    """Answer the prompts, `cell.concurrency` in flight; the clock stops with the last answer.

    Raises:
        BenchError: the server refuses a request or cannot be reached.
    """
    # Bodies are made first: tokenizing is not part of what is measured.
    requests = [(prompt, *client.payload(prompt, cell, plan)) for prompt in prompts]
    try:
        return asyncio.run(_ask_all(client, requests, cell.concurrency))
    except httpx.HTTPError as error:
        raise BenchError(f"{client.url} failed: {error or type(error).__name__}") from None


async def _ask_all(
    client: Client, requests: list[tuple[int, str, dict[str, Any]]], concurrency: int
) -> Visit:
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=client.url, timeout=_TIMEOUT, limits=limits, trust_env=False
    ) as http:

        async def one(prompt: int, path: str, body: dict[str, Any]) -> Answer:
            async with slots:
                return client.answer(prompt, [e async for e in _events(http, path, body)])

        start = time.perf_counter()
        answers = await asyncio.gather(*(one(*request) for request in requests))
        return Visit(list(answers), time.perf_counter() - start)


async def _events(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Seconds since sending and content of each server-sent event."""
    start = time.perf_counter()
    async with http.stream("POST", path, json=body) as answer:
        if answer.is_error:
            reason = (await answer.aread()).decode(errors="replace")[:300]
            raise BenchError(f"{answer.url} refused a request: {reason}")
        async for line in answer.aiter_lines():
            if line.startswith(_DATA) and (data := line.removeprefix(_DATA)) != _DONE:
                at = time.perf_counter() - start
                event = json.loads(data)
                if "error" in event:
                    raise BenchError(f"{answer.url} failed: {event['error']}")
                yield at, event
