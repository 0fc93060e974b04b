"""What a worker makes ready before it serves, and what it counts from then on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from topkd import kernels
from topkd.kernels import _cute_compile, _dispatch
from topkd.server._memory_host import HostBackend
from topkd.server._record import Recorder
from topkd.server._worker import warm_up
from topkd.server.metrics import ServerMetrics


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


class Broken:
    """A family that says that it serves, and fails."""

    name = "cluster"
    capturable = True

    def unmet(self, request: kernels.SelectRequest) -> str | None:
        return None

    def run(self, jobs: object) -> None:
        warnings.warn("compiled kernels are not kept", RuntimeWarning, stacklevel=2)
        raise ImportError("the compiler is of another machine")


def test_a_family_that_fails_is_logged_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_FAMILIES", (Broken(), _dispatch._FAMILIES[-1]))
    log = Log()
    families = warm_up(HostBackend(1), log)
    assert [family["name"] for family in families] == ["torch"]
    assert len(families[0]["dtypes"]) == 3
    failures = [fields for event, fields in log.lines if event == "kernel_unavailable"]
    assert len(failures) == 3
    assert "another machine" in failures[0]["message"]
    assert any(event == "warm_up_warning" and "not kept" in fields["message"] for event, fields in log.lines)


def test_compiles_of_the_start_and_those_that_came_too_late_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _cute_compile.Counter({("cluster", "compiled"): 3})
    monkeypatch.setattr(_cute_compile, "_COUNTS", counts)
    registry = CollectorRegistry()
    recorder = Recorder(ServerMetrics(registry))

    def exported() -> dict[tuple[str, str], float]:
        recorder.flush()
        families = [family for family in registry.collect() if family.name == "topkd_compiles"]
        samples = [sample for sample in families[0].samples if sample.name == "topkd_compiles_total"]
        return {(each.labels["kernel"], each.labels["phase"]): each.value for each in samples if each.value}

    assert exported() == {("cluster", "start"): 3}
    counts["cluster", "compiled"] += 1
    recorder.start()
    counts["cluster", "cache"] += 5
    assert exported() == {("cluster", "start"): 4}
    counts["radix_wide", "compiled"] += 2
    expected = {("cluster", "start"): 4, ("radix_wide", "ready"): 2}
    assert exported() == expected
    assert exported() == expected
