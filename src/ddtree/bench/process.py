"""An SGLang server on loopback, started and stopped from here."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddtree.bench.plan import BenchError
from ddtree.sglang.serve import SGLANG_COMMAND

_START_SECONDS = 900
_STOP_SECONDS = 60
_PORTS = range(20_000, 30_000)


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


class ServerProcess:
    """`sglang serve` in a session of its own, so that stopping it reaches all of its processes.

    Attributes:
        arguments: of `sglang serve`, without host and port.
        log: file that its output is appended to.
        environment: what differs from this process's.
        port: where it listens since the last `start`.
        process: its first process since the last `start`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.arguments, self.log = name, tuple(arguments), log
        self.environment = dict(environment or {})
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it on a free port and wait until it is healthy.

        Raises:
            BenchError: it stopped or did not answer; the message ends with its last error.
        """
        self.port = free_port()
        command = [
            *(sys.executable, "-c", SGLANG_COMMAND, "serve", *self.arguments),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        environment = os.environ | self.environment
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if not self.alive:
                raise BenchError(f"the server {self.name} stopped: {self._last_error()}")
            with contextlib.suppress(OSError), direct.open(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise BenchError(
            f"the server {self.name} did not answer within {_START_SECONDS} s: {self._last_error()}"
        )

    def _last_error(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines or ["its log is empty"]
        return f"{errors[-1][:300]} (see {self.log})"

    def stop(self) -> None:
        """Stop it with all of its processes; nothing happens where it does not run."""
        if self.process is None:
            return
        group = self.process.pid
        if self.process.poll() is None:
            # At once: on SIGTERM the server takes ten seconds to look for a crash.
            os.killpg(group, signal.SIGKILL)
            self.process.wait()
        # The next server may need the memory that its children still hold.
        deadline = time.monotonic() + _STOP_SECONDS
        while group in live_groups() and time.monotonic() < deadline:
            time.sleep(0.05)


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
