"""`ddtree bench` against real SGLang servers that it started, and through both of its clients."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")
pytest.importorskip("httpx")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import psutil
import torch

from ddtree.bench.client import OpenAIClient, ask, chat_ids
from ddtree.bench.measure import measure
from ddtree.bench.plan import BenchError, Cell, Contender, Plan
from ddtree.bench.prompts import load_prompts
from ddtree.bench.reference import Models, ReferenceBackend
from ddtree.bench.servers import LOG_ROUNDS, Endpoint, StartedServer, read_ledger

LENGTH = 40
STAGES = {"draft", "build", "verify", "accept", "commit"}


@pytest.fixture(scope="module")
def prompts(tiny_pair):
    return load_prompts(str(tiny_pair.prompts))


@pytest.fixture(scope="module")
def started(tiny_pair, prompts, tmp_path_factory):
    """A plain server and one with trees, started by the code under test."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    logs = tmp_path_factory.mktemp("logs")
    contenders = [Contender("ar", "ar"), Contender("tree", "ddtree", 16)]
    servers = [
        StartedServer(
            one, prompts, target=str(tiny_pair.target), drafter=str(tiny_pair.drafter),
            dtype="float32", log=logs / f"{one.label}.log",
        )
        for one in contenders
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(StartedServer.open, servers))
        yield servers
    finally:
        for server in servers:
            server.close()
        patch.undo()


@pytest.fixture(scope="module")
def plain_tokens(tiny_pair, prompts):
    """What the reference engine's plain decoding says to every prompt."""
    models = Models(str(tiny_pair.target), None, "float32", "cpu")
    backend = ReferenceBackend(Contender("ar", "ar"), prompts, models)
    plan = Plan(max_new_tokens=LENGTH, ignore_eos=True)
    return [a.tokens for a in backend.ask(range(len(prompts)), Cell(), plan).answers]


def members(group: int) -> list[str]:
    """Names of the processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if os.getpgid(process.pid) == group and not ended:
                found.append(process.name())
    return found


class Lasting:
    """A backend that `measure` may not close, since other tests go on with it."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, name):
        return (lambda: None) if name == "close" else getattr(self._server, name)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_started_servers_are_measured(started, plain_tokens, prompts, concurrency):
    plan = Plan(max_new_tokens=LENGTH, ignore_eos=True)
    cell = Cell(concurrency)
    (results,) = measure([Lasting(s) for s in started], [cell], len(prompts), plan)
    plain, tree = results
    for result in results:
        assert {a.prompt: a.tokens for a in result.answers} == dict(enumerate(plain_tokens))
        for answer in result.answers:
            assert answer.count == LENGTH
            assert answer.first_count >= 1
            assert 0 < answer.first_seconds < answer.seconds
    assert tree.verdict.gate == "equal"
    assert tree.verdict.passed is True
    assert plain.histogram == {1: (LENGTH - 1) * len(prompts)}
    committed = sum(n * rounds for n, rounds in tree.histogram.items())
    # The server counts a last round that is cut off as a whole, at most a block of 6.
    assert 0 <= committed - (LENGTH - 1) * len(prompts) < 6 * len(prompts)
    assert plain.ledger.rounds == 0


def test_the_ledger_comes_from_the_servers_log(started):
    tree = started[1]
    tree.ledger()
    visit = tree.ask([0, 1, 2, 3], Cell(), Plan(max_new_tokens=120, ignore_eos=True))
    rounds = sum(sum(a.histogram.values()) for a in visit.answers)
    ledger = tree.ledger()
    assert ledger.rounds % LOG_ROUNDS == 0
    assert abs(ledger.rounds - rounds) < LOG_ROUNDS
    assert set(ledger.milliseconds()) == STAGES
    assert sum(ledger.seconds.values()) < visit.seconds
    assert tree.ledger().rounds == 0, "a visit's rounds are counted once"


def test_the_log_line_is_read_as_it_is_written(caplog):
    from ddtree import build_tree
    from ddtree.sglang.observe import RoundLog

    log = RoundLog(2, "cpu")
    tree = build_tree(torch.randn(1, 3, 9), torch.tensor([1]), 4)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            for stage in STAGES:
                with log.stage(stage):
                    torch.randn(200, 200).sum()
            log.finish(tree)
    ledger = read_ledger("\n".join(caplog.messages))
    assert ledger.rounds == 4
    assert set(ledger.milliseconds()) == STAGES


def test_a_plain_server_scores_outputs(started, tiny_pair, prompts, plain_tokens):
    plain = started[0]
    assert max(plain.regrets(2, plain_tokens[2], Cell())) == pytest.approx(0, abs=1e-3)
    wrong = [*plain_tokens[2][:6], (plain_tokens[2][6] + 1) % 300, *plain_tokens[2][7:]]
    models = Models(str(tiny_pair.target), None, "float32", "cpu")
    engine = ReferenceBackend(Contender("ar", "ar"), prompts, models)
    expected = engine.regrets(2, wrong, Cell())
    assert plain.regrets(2, wrong, Cell()) == pytest.approx(expected, abs=5e-3)
    assert expected[6] > 0.5


def test_a_running_server_is_an_endpoint(started, prompts, plain_tokens):
    url = started[1]._client.url
    endpoint = Endpoint(Contender("mine", "endpoint", url=url), prompts, None)
    assert endpoint.dtype == "float32"
    assert endpoint.describe()["speculative_algorithm"] == "DDTREE"
    visit = endpoint.ask([3, 0], Cell(2), Plan(max_new_tokens=LENGTH, ignore_eos=True))
    assert [a.tokens for a in visit.answers] == [plain_tokens[3], plain_tokens[0]]


def test_the_openai_interface_gives_the_same_text(started, prompts, plain_tokens):
    client = OpenAIClient(started[1]._client.url, prompts)
    visit = ask(client, [0, 1], Cell(2), Plan(max_new_tokens=LENGTH, ignore_eos=True))
    tokenizer = started[0]._client._tokenizer
    for answer in visit.answers:
        expected = tokenizer.decode(plain_tokens[answer.prompt], skip_special_tokens=True)
        assert answer.text.strip("\ufffd") == expected.strip("\ufffd")
        assert (answer.count, answer.histogram, answer.tokens) == (LENGTH, None, None)
        assert 0 < answer.first_seconds < answer.seconds


def test_sampled_answers_have_rounds_too(started):
    cell = Cell(temperature=1.0)
    visit = started[1].ask([0], cell, Plan(max_new_tokens=20, ignore_eos=True))
    assert visit.tokens == 20
    assert visit.answers[0].histogram


def test_a_request_the_server_refuses_is_reported(started, tiny_pair):
    too_long = load_prompts(str(tiny_pair.prompts))[:1]
    text = "the tree " * 2000
    too_long[0].messages[0]["content"] = text
    tokenizer = started[0]._client._tokenizer
    assert len(chat_ids(tokenizer, too_long[0], Cell())) > 512
    endpoint = Endpoint(Contender("x", "endpoint", url=started[0]._client.url), too_long, None)
    with pytest.raises(BenchError, match=r"127\.0\.0\.1"):
        endpoint.ask([0], Cell(), Plan(max_new_tokens=4))


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tiny_pair, prompts, tmp_path):
    server = StartedServer(
        Contender("bad", "ddtree", 16, ("--pp-size", "2")), prompts, target=str(tiny_pair.target),
        drafter=str(tiny_pair.drafter), dtype="float32", log=tmp_path / "bad.log",
    )  # fmt: skip
    with pytest.raises(BenchError, match="pipeline parallelism"):
        server.open()
    assert not members(server.server.process.pid)


def test_closing_stops_every_process_of_the_server(started):
    """Last: the plain server is gone after it."""
    group = started[0].server.process.pid
    assert len(members(group)) >= 3, "scheduler, detokenizer, HTTP server"
    started[0].close()
    assert not members(group)
