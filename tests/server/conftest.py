"""One server that the process-level tests share: small limits, TCP on loopback."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import ServerProcess, Session

ATTACH_TOKEN = "a-token-of-the-tests-0123456789"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="topkd-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def front() -> Iterator[ServerProcess]:
    """A shared server; tests leave it as they found it."""
    path = Path(tempfile.mkdtemp(prefix="topkd-"))
    (path / "token").write_text(f"{ATTACH_TOKEN}\n")
    server = ServerProcess(
        path / "s",
        tcp_address="127.0.0.1:0",
        tcp_token_file=str(path / "token"),
        max_sessions=6,
        max_regions=5,
        max_region_bytes=1 << 24,
        max_session_bytes=1 << 25,
        max_plans=3,
        max_batch=8,
        max_rows=100_000,
        max_message_bytes=1 << 20,
        max_queue=4,
        spares=3,
        log_level="debug",
        attach_timeout_s=90,
    )
    try:
        yield server.wait_serving()
    finally:
        code = server.stop()
        shutil.rmtree(path, ignore_errors=True)
    assert code == 0, "".join(server.text)[-3000:]


@pytest.fixture(scope="module")
def module_session(front: ServerProcess) -> Iterator[Session]:
    with Session(front) as opened:
        yield opened


@pytest.fixture
def session(module_session: Session) -> Iterator[Session]:
    """A session that the tests of a module share; what a test registers is released after it."""
    yield module_session
    module_session.clean()
