"""The daemon of CUDA MPS, for as long as a measurement needs it, and the lack of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_SECONDS = 20


def _ask(command: str, environment: dict[str, str]) -> bool:
    asked = subprocess.run(
        [CONTROL], input=f"{command}\n", env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    return asked.returncode == 0


@contextmanager
def with_mps() -> Iterator[dict[str, str] | None]:
    """Yields the environment of processes under MPS, or None where there is none.

    A daemon that runs already (for this user's pipe directory) is used as it is; else one is started, and stopped at
    the end.
    """
    if shutil.which(CONTROL) is None:
        yield None
        return
    environment = dict(os.environ)
    if _ask("get_server_list", environment):
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="topkd-mps-") as folder:
        environment |= {PIPES: folder, LOGS: folder}
        started = subprocess.run([CONTROL, "-d"], env=environment, timeout=_SECONDS, check=False).returncode == 0
        try:
            yield environment if started else None
        finally:
            if started:
                _ask("quit", environment)


def without_mps() -> dict[str, str]:
    """Returns the environment of processes that find no daemon, whether one runs or not."""
    return dict(os.environ) | {PIPES: str(Path(tempfile.gettempdir()) / "topkd-no-mps")}
