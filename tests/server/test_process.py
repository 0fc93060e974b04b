"""What the server says of MPS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from topkd.server._process import mps_runs, tell_of_mps


class Log:
    """Keeps the last event."""

    def info(self, event: str, **fields: Any) -> None:
        self.event, self.fields = event, fields


@pytest.mark.parametrize(
    ("runs", "said"), [(False, "387 us instead of 101"), (True, "fatal GPU fault of one of its clients")]
)
def test_the_log_says_what_mps_means(tmp_path: Path, runs: bool, said: str) -> None:
    if runs:
        os.mkfifo(tmp_path / "control")
    assert mps_runs(str(tmp_path)) is runs
    log = Log()
    tell_of_mps(log, str(tmp_path))  # type: ignore[arg-type]
    assert log.event == "mps"
    assert log.fields["active"] is runs
    assert said in log.fields["means"]
