"""Contenders that are servers: running ones, and SGLang servers started and stopped here."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from ddtree.bench import client as clients
from ddtree.bench.answers import Ledger, Visit
from ddtree.bench.plan import BenchError, Cell, Contender, Plan
from ddtree.sglang.serve import Mode, launch_arguments
from ddtree.train.prompts import Prompt

_START_SECONDS = 900
_STOP_SECONDS = 60
_PORTS = range(20_000, 30_000)
# What the script `sglang` runs; the script itself need not be on the path.
_SGLANG_COMMAND = "from sglang.cli.main import main; main()"
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


def free_port() -> int:
    """A loopback port that will still be free when a server starts to listen, a minute later.

    Below the range from which the kernel gives ports to outgoing connections: one of those may be
    taken by any client on the machine in the meantime.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchError(f"every port from {_PORTS[0]} to {_PORTS[-1]} is taken; stop some servers")


class StartedServer:
    """An SGLang server of our own, in its own session, so that stopping it reaches all of it."""

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
        self._target, self._drafter, self._served_dtype = target, drafter, dtype
        self._prompts, self._log, self._extra = prompts, log, list(extra)
        self._process: subprocess.Popen[bytes] | None = None
        self._client: clients.SGLangClient | None = None
        self._read = 0
        self._info: dict[str, Any] = {}

    def open(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        port = free_port()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(port), stdout=log, stderr=subprocess.STDOUT,
                env=self._environment(), start_new_session=True,
            )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            self._await_health(url)
        except BaseException:
            self.close()
            raise
        self._client = clients.SGLangClient(url, self._prompts, load_tokenizer(self._target))
        self._info = self._client.info()

    def _command(self, port: int) -> list[str]:
        one = self.contender
        arguments = launch_arguments(
            target=self._target, drafter=self._drafter, mode=Mode(one.mode),
            budget=one.budget or 0, block_size=None, host="127.0.0.1", port=port,
            dtype=self._served_dtype, extra=[*self._extra, *one.arguments],
        )  # fmt: skip
        return [sys.executable, "-c", _SGLANG_COMMAND, "serve", *arguments]

    def _environment(self) -> dict[str, str]:
        own = {"DDTREE_LOG_ROUNDS": str(LOG_ROUNDS)} | dict(self.contender.environment)
        return os.environ | own

    def _await_health(self, url: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(f"the server {self.contender.label} stopped: {self._last_line()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.5)
        raise BenchError(
            f"the server {self.contender.label} did not answer within {_START_SECONDS} s: "
            f"{self._last_line()}"
        )

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines or ["its log is empty"]
        return f"{errors[-1][:300]} (see {self._log})"

    def close(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        # At once: on SIGTERM the server takes ten seconds to look for a crash.
        group = self._process.pid
        os.killpg(group, signal.SIGKILL)
        self._process.wait()
        # The next server may need the memory that its children still hold.
        deadline = time.monotonic() + _STOP_SECONDS
        while group in live_groups() and time.monotonic() < deadline:
            time.sleep(0.05)

    def flush(self) -> None:
        self._connected().flush()

    def _connected(self) -> clients.SGLangClient:
        assert self._client is not None, "the server is not open"
        return self._client

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        return clients.ask(self._connected(), prompts, cell, plan)

    def ledger(self) -> Ledger:
        """Stage times logged since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
            self._read = log.tell()
        return read_ledger(text.decode(errors="replace"))

    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        return self._connected().regrets(prompt, tokens, cell)

    def describe(self) -> dict[str, Any]:
        return described(self._info)


def live_groups() -> set[int]:
    """Process groups with a member that has not ended (Linux)."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # What follows the command's closing parenthesis: state, parent, group.
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                found.add(int(group))
    return found


def read_ledger(log: str) -> Ledger:
    """Sum up the lines of `ddtree.sglang.observe.RoundLog`."""
    ledger = Ledger()
    for first, last, times in _ROUND_LINE.findall(log):
        rounds = int(last) - int(first) + 1
        stages = {name: float(ms) / 1e3 * rounds for name, ms in _STAGE.findall(times)}
        ledger.add(rounds, stages)
    return ledger
