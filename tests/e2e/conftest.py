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


@pytest.fixture(scope="session")
def cpu() -> Iterator[Running]:
    """The server on CPU tensors that most tests here share; its sessions are one module's at a time. Do not harm it."""
    with _launching() as start:
        yield start()
