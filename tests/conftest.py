"""What all tests share: hypothesis profiles, and real servers started as processes of their own.

Profiles, by `--hypothesis-profile=NAME` or the environment variable HYPOTHESIS_PROFILE:
`default` draws few examples, the same ones each time; `thorough` draws many, new ones each time, from the seed in the
head of the output (`--hypothesis-seed=N` repeats it). A failing example prints with the blob that reproduces it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings

from tests.watch import tools

_SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "default",
    max_examples=300,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_DATA,
)
settings.register_profile(
    "thorough", max_examples=20000, derandomize=False, deadline=None, print_blob=True, suppress_health_check=_SLOW_DATA
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
MOST_CACHED = 256 << 20
"""Bytes of a GPU's memory that torch may keep between tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed here where none is given, so that it can be printed."""
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the tests by groups (tests/groups.py) where `--dist loadgroup` asks for it, as `make test` does."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.groups import Groups

    return Groups(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    """Say how the random cases of this run can be had again."""
    chosen = settings()
    drawn = "the same each run" if chosen.derandomize else f"--hypothesis-seed={config.option.hypothesis_seed}"
    lacking = tools.missing()
    why = f"; missing here: {', '.join(lacking)}" if lacking else ""
    watch = f"tests/watch (marked watch) run by make watch-check only{why}"
    return f"random cases: {chosen.max_examples} examples a test, {drawn}\n{watch}"


@pytest.fixture(autouse=True)
def cached_memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What torch cached of a GPU for a test goes back after it: many processes and servers share the memory."""
    yield
    torch = sys.modules.get("torch")
    if request.node.get_closest_marker("gpu") is None or torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() > MOST_CACHED:
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let every process of pytest-xdist begin with its share of the tests that take longest.

    `--dist worksteal` gives each a run of neighbouring tests; a long one at the end of a run would be waited for.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes > 1 and not config.option.loadgroup:
        items[:] = slow_ones_first(items, processes)


def slow_ones_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return tests in another order: of as many equal runs as there are processes, each begins with slow ones."""
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    others = [item for item in items if item.get_closest_marker("slow") is None]
    ordered: list[pytest.Item] = []
    for place in range(processes):
        size = (len(items) - len(ordered)) // (processes - place)
        first = slow[place::processes]
        rest = max(0, size - len(first))
        ordered += [*first, *others[:rest]]
        del others[:rest]
    return ordered + others


@dataclass(frozen=True)
class Server:
    """A server process that answers health checks; its output goes to `log`."""

    socket_dir: Path
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """End it by SIGTERM, then by SIGKILL, and return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(STOP_TIMEOUT_S)


class StartServer(Protocol):
    """`start_server(device="cpu", **flags)`: each flag `some_flag=value` becomes `--some-flag value`."""

    def __call__(self, device: str = "cpu", **flags: object) -> Server:
        """Start one and wait until it serves."""


def _command(socket_dir: Path, device: str, flags: dict[str, object]) -> list[str]:
    given: dict[str, object] = {"device": device, "socket_dir": socket_dir, "metrics_port": 0, **flags}
    command = [sys.executable, "-m", "topkd", "serve"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [] if value is False or value is None else [flag, str(value)]
    return command


def _wait_until_healthy(server: Server) -> None:
    probe = [sys.executable, "-m", "topkd", "health", "--socket-dir", str(server.socket_dir)]
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        status = server.process.poll()
        if status is None:
            asked = subprocess.run(probe, capture_output=True, check=False, timeout=START_TIMEOUT_S, cwd="/")
            if asked.returncode == 0:
                return
            time.sleep(0.2)
            continue
        raise RuntimeError(f"the server ended with {status} at its start:\n{_tail(server.log)}")
    raise RuntimeError(f"the server did not become healthy in {START_TIMEOUT_S} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


@pytest.fixture(scope="session")
def start_server() -> Iterator[StartServer]:
    """A factory of servers, for tests that need one of their own; all are stopped at the end of the run."""
    started: list[tuple[Server, Path]] = []

    def start(device: str = "cpu", **flags: object) -> Server:
        folder = Path(tempfile.mkdtemp(prefix="topkd-"))  # short: the path of a Unix socket has at most 107 bytes
        socket_dir, log = folder / "sockets", folder / "server.log"
        socket_dir.mkdir(mode=0o750)
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(socket_dir, device, flags), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )
        server = Server(socket_dir, process, log)
        started.append((server, folder))
        _wait_until_healthy(server)
        return server

    yield start
    for server, folder in started:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def page() -> Iterator[int]:
    """A session's page of words."""
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Server:
    """The server on CPU tensors that most tests share; do not harm it."""
    return start_server("cpu")


@pytest.fixture(scope="module")
def cuda_server(start_server: StartServer) -> Iterator[Server]:
    """A module's server on CUDA tensors: a GPU takes some 36 contexts without MPS, and each server has two or more."""
    server = start_server("cuda")
    yield server
    server.stop()
