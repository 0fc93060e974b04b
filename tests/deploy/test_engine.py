"""The example engine of the compose file and the chart, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Server

ENGINE = Path(__file__).resolve().parents[2] / "deploy/helm/topkd/files/engine.py"


def test_it_selects_until_it_is_told_to_stop(server: Server) -> None:
    engine = subprocess.Popen(
        [sys.executable, str(ENGINE), "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=os.environ | {"TOPKD_SOCKET_DIR": str(server.socket_dir)},
    )
    try:
        assert engine.stdout is not None
        first = engine.stdout.readline()
        engine.terminate()
        _, errors = engine.communicate(timeout=60)
    finally:
        engine.kill()
    assert first.startswith("1 selections of 16 x 131072, k = 2048, by torch"), first + errors
    assert engine.returncode == 0, errors
