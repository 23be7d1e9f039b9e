"""Contenders that are servers: running ones, and SGLang servers started and stopped here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from ddtree.bench import client as clients
from ddtree.bench.answers import Ledger, Visit
from ddtree.bench.plan import BenchError, Cell, Contender, Plan
from ddtree.bench.process import ServerProcess
from ddtree.sglang.serve import Mode, launch_arguments
from ddtree.train.prompts import Prompt

LOG_ROUNDS = 16
_ROUND_LINE = re.compile(r"DDTREE rounds (\d+) to (\d+), batch \d+: (.*?)(?:; tree:|$)")
_STAGE = re.compile(r"(\w+) ([\d.]+) ms")


class Endpoint:
    """A server that is already running."""

    def __init__(self, contender: Contender, prompts: Sequence[Prompt], target: str | None) -> None:
        assert contender.url is not None
        self.contender = contender
        self._client = connect(contender.url, prompts, target)
        self._info = self._client.info()

    @property
    def dtype(self) -> str | None:
        named = self._info.get("dtype")
        return named if named in ("float32", "bfloat16", "float16") else None

    @property
    def can_score(self) -> bool:
        return self._client.can_score

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def flush(self) -> None:
        self._client.flush()

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        return clients.ask(self._client, prompts, cell, plan)

    def ledger(self) -> Ledger:
        """A running server's log is not at hand."""
        return Ledger()

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        return self._client.regrets(prompt, tokens, cell)

    def describe(self) -> dict[str, Any]:
        return described(self._info)


def connect(url: str, prompts: Sequence[Prompt], target: str | None) -> clients.Client:
    """The client that fits the server at `url`; `target` names its tokenizer if it does not.

    Raises:
        BenchError: nothing answers there, or the tokenizer cannot be loaded.
    """
    try:
        sglang = httpx.get(f"{url}/model_info", timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        raise BenchError(f"nothing answers at {url} ({error}); start a server there") from None
    if sglang.is_error:
        return clients.OpenAIClient(url, prompts)
    return clients.SGLangClient(
        url, prompts, load_tokenizer(target or sglang.json()["tokenizer_path"])
    )


def load_tokenizer(name: str) -> Any:
    """The target's tokenizer, with a chat template.

    Raises:
        BenchError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BenchError(
            f"the tokenizer {name} cannot be loaded ({reason}); name the target with --target"
        ) from None
    if not tokenizer.chat_template:
        raise BenchError(f"the tokenizer of {name} has no chat template; use a chat model")
    return tokenizer


def described(info: dict[str, Any]) -> dict[str, Any]:
    """The part of a server's description that a reader of its figures needs."""
    wanted = (
        *("version", "dtype", "attention_backend", "device", "tp_size", "page_size"),
        *("speculative_algorithm", "speculative_num_draft_tokens", "max_running_requests"),
        *("max_total_tokens", "disable_cuda_graph", "disable_overlap_schedule"),
    )
    return {name: info[name] for name in wanted if info.get(name) is not None}


class StartedServer:
    """An SGLang server of our own."""

    can_score = True

    def __init__(
        self,
        contender: Contender,
        prompts: Sequence[Prompt],
        *,
        target: str,
        drafter: str | None,
        dtype: str,
        log: Path,
        extra: Sequence[str] = (),
    ) -> None:
        if find_spec("sglang") is None:
            raise BenchError(
                "SGLang is not installed; pip install 'sglang-ddtree[sglang]', or use "
                "--engine reference"
            )
        if contender.mode != "ar" and drafter is None:
            raise BenchError(f"{contender.label} needs a drafter; name one with --drafter")
        self.contender = contender
        self.dtype = dtype if dtype != "auto" else None
        arguments = launch_arguments(
            target=target, drafter=drafter, mode=Mode(contender.mode),
            budget=contender.budget or 0, block_size=None, dtype=dtype,
            extra=[*extra, *contender.arguments],
        )  # fmt: skip
        environment = {"DDTREE_LOG_ROUNDS": str(LOG_ROUNDS)} | dict(contender.environment)
        self.server = ServerProcess(contender.label, arguments, log, environment)
        self._target, self._prompts = target, prompts
        self._client: clients.SGLangClient | None = None
        self._read = 0
        self._info: dict[str, Any] = {}

    def open(self) -> None:
        if self.server.alive:
            return
        self.server.start()
        tokenizer = load_tokenizer(self._target)
        self._client = clients.SGLangClient(self.server.url, self._prompts, tokenizer)
        self._info = self._client.info()

    def close(self) -> None:
        self.server.stop()

    def flush(self) -> None:
        self._connected().flush()

    def _connected(self) -> clients.SGLangClient:
        assert self._client is not None, "the server is not open"
        return self._client

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        return clients.ask(self._connected(), prompts, cell, plan)

    def ledger(self) -> Ledger:
        """Stage times logged since the last call."""
        with self.server.log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
            self._read = log.tell()
        return read_ledger(text.decode(errors="replace"))

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        return self._connected().regrets(prompt, tokens, cell)

    def describe(self) -> dict[str, Any]:
        return described(self._info)


def read_ledger(log: str) -> Ledger:
    """Sum up the lines of `ddtree.sglang.observe.RoundLog`."""
    ledger = Ledger()
    for first, last, times in _ROUND_LINE.findall(log):
        rounds = int(last) - int(first) + 1
        stages = {name: float(ms) / 1e3 * rounds for name, ms in _STAGE.findall(times)}
        ledger.add(rounds, stages)
    return ledger
