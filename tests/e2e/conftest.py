"""Servers of this folder's own: with a known metrics port, and free to be harmed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from tests.e2e.servers import Running
from topkd import _mps
from topkd._lane import WaitsBy


class Launch(Protocol):
    """`launch(device="cpu", limits={...}, **flags)`; underscores of flags become dashes."""

    def __call__(self, device: str = "cpu", limits: dict[str, int] | None = None, **flags: object) -> Running:
        """Starts a server and waits until it serves."""


@contextmanager
def _launching() -> Iterator[Launch]:
    started: list[Running] = []
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))  # short: the path of a Unix socket has at most 107 bytes

    def start(device: str = "cpu", limits: dict[str, int] | None = None, **flags: object) -> Running:
        dashed = {name.replace("_", "-"): value for name, value in flags.items()}
        server = Running(folder / str(len(started)), device, dashed, limits or {})
        started.append(server)
        return server.start()

    try:
        yield start
    finally:
        for server in started:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """A factory of servers that end with the module."""
    with _launching() as start:
        yield start


@pytest.fixture(params=["operations", pytest.param("kernel", marks=pytest.mark.mps)])
def waits_by(request: pytest.FixtureRequest) -> WaitsBy:
    """What calls of lanes on streams are: each kind that there is here."""
    kind: WaitsBy = request.param
    if kind == "kernel" and not under_mps():
        pytest.skip("kernels that wait need MPS")
    return kind


def under_mps() -> bool:
    """Says whether this process's CUDA work goes through MPS."""
    from cuda.bindings import driver

    driver.cuInit(0)
    return _mps.active(driver, 0)


@pytest.fixture(scope="session")
def cpu() -> Iterator[Running]:
    """The server on CPU tensors that most tests here share; its sessions are one module's at a time. Do not harm it."""
    with _launching() as start:
        yield start()
