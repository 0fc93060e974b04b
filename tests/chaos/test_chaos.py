"""What `make chaos` would not overlook: a wrong answer, a client that hangs or fails, a run without harm."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import oracle
from tests.chaos import run
from tests.chaos.run import Chaos, Report
from tests.chaos.work import DATA, Work, draw_case


class Client:
    """Gives memory, and plans that nobody runs."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        import ml_dtypes

        return np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def plan(self, *_: Any, **options: Any) -> dict[str, Any]:
        return options


@pytest.mark.parametrize("seed", range(12))
def test_one_bit_that_is_wrong_is_seen(seed: int) -> None:
    work = Work(Client(), np.random.default_rng(seed), cuda=False)
    outputs = work.plan
    for _ in range(DATA + 1):
        data = work.feed()
        assert work.differences(data) > 0, "the outputs were spoiled"
        outputs["out_indices"][:] = data.indices
        if work.case.values:
            work._bits(outputs["out_values"])[:] = data.values
        assert work.differences(data) == 0
        outputs["out_indices"][-1, -1] ^= 1
        assert work.differences(data) == 1
        outputs["out_indices"][-1, -1] ^= 1
        if work.case.values:
            work._bits(outputs["out_values"])[0, 0] ^= 1
            assert work.differences(data) == 1


def test_requests_are_mixed_and_have_one_answer() -> None:
    drawn = [draw_case(np.random.default_rng(seed)) for seed in range(40)]
    for name in ("dtype", "rows", "order", "ties", "group", "largest", "values"):
        assert len({str(getattr(case, name)) for case in drawn}) > 1, name
    assert all(all(oracle.expected(case).unique) for case in drawn[:10])


ENGINE = """
import json, sys, time
for line in sys.argv[1].splitlines():
    print(line, flush=True)
    time.sleep(0.2)
if "hang" in sys.argv[1]:
    time.sleep(60)
sys.exit("failed" in sys.argv[1])
"""


class Server:
    """A server that nobody needs."""

    socket_dir = Path("/nowhere")

    def workers(self) -> set[int]:
        return set()


def judged(monkeypatch: pytest.MonkeyPatch, *says: dict[str, Any]) -> list[str]:
    """Returns the failures of a client that says these lines."""
    text = "\n".join(json.dumps(line) for line in says)
    popen = run.subprocess.Popen
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda _, **kwargs: popen([sys.executable, "-c", ENGINE, text], **kwargs)
    )
    monkeypatch.setattr(run, "HANG_S", 1.0)
    monkeypatch.setattr(Chaos, "_kill_client", lambda self: False)
    options = argparse.Namespace(seconds=4.0, clients=1, device="cpu", client_kill=60.0, worker_kill=60.0, seed=1)
    chaos = Chaos(Server(), options)  # type: ignore[arg-type]
    monkeypatch.setattr(chaos, "_end", lambda: [client.close() for client in chaos._clients])
    monkeypatch.setattr(run, "START_S", 5.0)
    return chaos.run().failures


CALLING = {"state": "calling", "mode": "polled", "worker": 0, "calls": 3, "wrong": 0, "lost": 0}
ENDED = {"state": "ended", "calls": 3, "wrong": 0, "lost": 0}


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ([CALLING, ENDED], ""),
        ([CALLING, {"state": "wrong", "differences": 1, "calls": 4}, ENDED], "wrong"),
        ([CALLING, {"state": "failed", "error": "KeyError"}], "KeyError"),
        ([CALLING], "ended with 0"),
        ([CALLING, {"state": "calling", "note": "hang"}], "hangs"),
    ],
)
def test_a_client_that_does_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, says: list[dict[str, Any]], told: str
) -> None:
    failures = judged(monkeypatch, *says)
    assert told in " ".join(failures)
    assert bool(failures) == bool(told)


@pytest.mark.parametrize(("seconds", "told"), [(60.0, ""), (1.0, "hangs: lost")])
def test_a_client_has_longer_for_its_next_session(monkeypatch: pytest.MonkeyPatch, seconds: float, told: str) -> None:
    monkeypatch.setattr(run, "LOST_S", seconds)
    failures = judged(monkeypatch, CALLING, {"state": "lost", "note": "hang"})
    assert told in " ".join(failures)
    assert bool(failures) == bool(told)


def test_a_run_without_harm_proves_nothing() -> None:
    report = Report(1.0)
    assert report.verdict()
    report.counts.update(calls=1, clients_killed=1, workers_killed=1)
    assert not report.verdict()
    report.failures.append("x")
    assert report.verdict() == ["x"]
    assert "FAILED: x" in report.text()
