"""Real SGLang servers on loopback, one per configuration, started when first asked for.

They sleep when idle: a scheduler that polls takes a whole core from the server under test.

At most `MAX_ALIVE` servers run at a time in each test process, because each takes about 3 GiB:
using another stops the one that was used longest ago, and using that again starts it anew. Tests
skip where SGLang is not installed.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import tiny

if TYPE_CHECKING:
    from ddtree.bench.process import ServerProcess

MAX_ALIVE = 2
# Processors may read the output so far, which the host knows only without overlap scheduling.
IN_STEP = ("--disable-overlap-schedule", "--enable-custom-logit-processor")
# Whether a small pool fills depends on how fast clients ask; SGLang's own tests retract by this.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
# A width chosen every round, at random (see `any_width/sitecustomize.py`).
_PYTHONPATH = filter(None, [str(Path(__file__).parent / "any_width"), os.environ.get("PYTHONPATH")])
ANY_WIDTH = {"DDTREE_BUDGET": "auto", "PYTHONPATH": os.pathsep.join(_PYTHONPATH)}
# One thread per process: two of these tests' servers share two cores, and OpenMP threads that spin
# for each other are much slower than one.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(
            reason="SGLang is not installed (pip install sglang-ddtree[sglang])"
        )
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


class Server:
    """A running server and the requests tests make of it."""

    def __init__(self, process: ServerProcess, pool: ServerPool) -> None:
        self._process, self._pool = process, pool

    @property
    def url(self) -> str:
        """Where it answers; started anew if it had to make room."""
        self._pool.wake(self)
        return self._process.url

    @property
    def port(self) -> int:
        return self._process.port

    @property
    def log(self) -> Path:
        return self._process.log

    @property
    def alive(self) -> bool:
        return self._process.alive

    def start(self) -> None:
        from ddtree.bench.plan import BenchError

        try:
            self._process.start()
        except BenchError as error:
            pytest.fail(f"{error}\n{self.tail()}")

    def stop(self) -> None:
        self._process.stop()

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:400] for line in text[-lines:])

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """One `/generate` call."""
        try:
            return json.loads(self.post("/generate", request))
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}: {error.read()[:500]!r}\n{self.tail()}")

    def post(self, path: str, payload: dict[str, Any] | None = None) -> bytes:
        """Body of the answer to a JSON request."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(payload or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return answer.read().decode()

    def generate_all(
        self, requests: Sequence[dict[str, Any]], *, at_once: int = 1, seed: int = 0
    ) -> list[dict[str, Any]]:
        """Answers in the order of `requests`; sent in random order when several are in flight."""
        order = list(range(len(requests)))
        if at_once > 1:
            random.Random(seed).shuffle(order)
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            answers = dict(
                zip(order, pool.map(lambda i: self.generate(requests[i]), order), strict=True)
            )
        return [answers[i] for i in range(len(requests))]

    def flush(self) -> None:
        """Empty the radix cache."""
        self.post("/flush_cache")


class ServerPool:
    """Servers by their arguments and environment."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._known: dict[tuple[Any, ...], Server] = {}
        self._running: list[Server] = []  # the one used last at the end
        self._waking = threading.Lock()

    def get(self, *arguments: str, environment: dict[str, str] | None = None) -> Server:
        from ddtree.bench.process import ServerProcess  # needs what comes with SGLang's extras

        environment = ENVIRONMENT | (environment or {})
        key = (arguments, *sorted(environment.items()))
        if key not in self._known:
            name = f"server-{len(self._known) + 1}"
            process = ServerProcess(
                name, ("--sleep-on-idle", *arguments), self._logs / f"{name}.log", environment
            )
            self._known[key] = Server(process, self)
        server = self._known[key]
        if server in self._running and not server.alive:  # a test before this one broke it
            self._running.remove(server)
            server.stop()
        self.wake(server)
        return server

    def wake(self, server: Server) -> None:
        """Start a server that was stopped to make room; one that broke stays as it is.

        Called by every client of a test at once.
        """
        with self._waking:
            if server in self._running:
                self._running.remove(server)
            else:
                while len(self._running) >= MAX_ALIVE:
                    self._running.pop(0).stop()
                server.start()
            self._running.append(server)

    def stop_all(self) -> None:
        for server in self._known.values():
            server.stop()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop_all()


@dataclass(frozen=True)
class TinyModels:
    """Folders of a tiny target and drafter, and the arguments that serve them."""

    target: Path
    drafter: Path
    reading: tuple[str, ...] = ("--skip-tokenizer-init", "--context-length", "2048")

    def plain(self, *extra: str) -> tuple[str, ...]:
        return (
            *("--model-path", str(self.target), *self.reading, "--dtype", "float32"),
            *("--max-total-tokens", "16384", "--max-running-requests", "8"),
            *extra,
        )

    def exact_plain(self) -> tuple[str, ...]:
        """Where penalties and processors see all of the output: without overlap scheduling."""
        return self.plain(*IN_STEP)

    def ddtree(self, width: int, *extra: str) -> tuple[str, ...]:
        return self.plain(
            *("--speculative-algorithm", "DDTREE"),
            *("--speculative-draft-model-path", str(self.drafter)),
            *("--speculative-num-draft-tokens", str(width)),
            *extra,
        )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    folder = tmp_path_factory.mktemp("tiny")
    return TinyModels(tiny.write_target(folder / "target"), tiny.write_drafter(folder / "drafter"))


@pytest.fixture(scope="session")
def text_models(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A pair with a tokenizer of bytes, whose answers are noise: grammars have work to do."""
    from transformers import AutoModelForCausalLM

    from ddtree.drafter import random_drafter, save_drafter

    bound = random_drafter(AutoModelForCausalLM.from_pretrained(tiny_target), block_size=8)
    folder = tmp_path_factory.mktemp("tiny-text") / "drafter"
    save_drafter(bound.model, bound.config, folder)
    return TinyModels(tiny_target, folder, ("--context-length", "512"))


@pytest.fixture(scope="session")
def text_plain(servers: ServerPool, text_models: TinyModels) -> Server:
    return servers.get(*text_models.plain())


@pytest.fixture(scope="session")
def text_ddtree(servers: ServerPool, text_models: TinyModels) -> Server:
    return servers.get(*text_models.ddtree(17))


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


def default_arguments(target: Path, *extra: str, dtype: str = "float32") -> tuple[str, ...]:
    """How the default target is served."""
    return (
        *("--model-path", str(target), "--dtype", dtype, "--context-length", "2048"),
        *("--max-total-tokens", "8192", "--max-running-requests", "8", "--enable-metrics"),
        *extra,
    )


@pytest.fixture(scope="session")
def default_plain(servers: ServerPool, smollm2: Path) -> Server:
    return servers.get(*default_arguments(smollm2))


@pytest.fixture(scope="session")
def ddtree_at(servers: ServerPool, smollm2: Path, drafter: Path) -> Callable[..., Server]:
    """A DDTREE server of a width and dtype."""

    def get(width: int, dtype: str = "float32") -> Server:
        tree = ("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", str(width))
        files = ("--speculative-draft-model-path", str(drafter))
        return servers.get(*default_arguments(smollm2, *tree, *files, dtype=dtype))

    return get


@pytest.fixture(scope="session")
def default_ddtree(ddtree_at: Callable[..., Server]) -> Server:
    return ddtree_at(17)


def tiny_requests(count: int, seed: int = 0, **parameters: Any) -> list[dict[str, Any]]:
    """Random prompts of 1 to 120 tokens with different lengths and stop conditions."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(3, tiny.VOCABULARY - 1) for _ in range(rng.randrange(1, 121))]
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": rng.choice([1, 2, 5, 17, 64, 100]),
            "ignore_eos": rng.random() < 0.7,
        }
        if rng.random() < 0.3:
            sampling["stop_token_ids"] = [rng.randrange(3, tiny.VOCABULARY)]
        requests.append({"input_ids": prompt, "sampling_params": sampling | parameters})
    return requests


@pytest.fixture(scope="session")
def plain_answers(servers: ServerPool, tiny_models: TinyModels) -> dict[str, list[Any]]:
    """What the plain server says to `tiny_requests`, asked one by one; kept for all tests."""
    server = servers.get(*tiny_models.exact_plain())
    return {"greedy": [outcome(a) for a in server.generate_all(tiny_requests(40))]}


def outcome(answer: dict[str, Any]) -> tuple[list[int], str, int]:
    """Everything about an answer that decoding must not change: tokens, why it ended, the count."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    return (
        answer["output_ids"],
        f"{reason['type']}:{reason.get('matched')}:{reason.get('length')}",
        meta["completion_tokens"],
    )


def rounds_by_arm(server: Server) -> dict[str, float]:
    """Decode rounds so far by how they were run, from a server that exports metrics."""
    lines = server.get("/metrics").splitlines()
    found = (re.match(r'ddtree_rounds_total{.*arm="(\w+)".*} (\S+)', line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}
