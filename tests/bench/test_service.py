from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import service, service_client, service_lanes, service_load, service_report
from tests.bench.service_mode import SHORT, Work
from tests.case import Case
from tests.oracle import expected

CALLS = {"stream_echo": 200.0, "stream_plan": 230.0, "unary_echo": 400.0, "unary_plan": 450.0}


def found(mode: str = "armed") -> dict[str, Any]:
    lane = {
        "shape": "16 x 131,072 k=2,048",
        "kernel": "cluster",
        "mode": mode,
        "kernel_us": 12.0,
        "lane_minus_local_us": {"p50": 4.0, "p99": 9.0},
        "lane_in_graph_minus_local_us": {"p50": 6.0, "p99": 7.0},
        "lane_us": 16.0,
        "lane_in_graph_us": 18.0,
        "lane_in_a_row_us": 13.75,
        "kernel_in_a_row_us": 8.25,
        "host_lane_us": {"p50": 17.0, "p99": 30.0},
        "host_lane_minus_kernel_us": {"p50": 5.0, "p99": 18.0},
        "best_public_us": 14.9,
    }
    ratios = {"stream_over_echo": 1.15, "unary_over_echo": 1.125, "batch64_over_one": 1.4}
    return {"device": "NVIDIA H200", "lanes": [lane], "calls_us": CALLS, "soak": {"wrong": 0}} | ratios


def without_graphs() -> dict[str, Any]:
    figures = found("polled")
    kept = ("shape", "kernel", "mode", "kernel_us", "lane_minus_local_us", "host_lane_us", "host_lane_minus_kernel_us")
    return figures | {"lanes": [{key: figures["lanes"][0][key] for key in kept}]}


def test_the_record_has_every_figure_once_for_each_mode() -> None:
    record = service_report.record({"mps": found(), "no_mps": found()}, {"date": "2026-12-01"})
    for figures in (record, record["no_mps"]):
        assert set(service_report.KEYS) <= set(figures)
        assert figures["lane_minus_local_us"] == {"p50": 4.0, "p99": 9.0}
        assert figures["host_lane_us"] == 17.0
        assert figures["stream_over_echo"] == 1.15
        assert figures["details"]["soak"] == {"wrong": 0}
    assert record["date"] == "2026-12-01"
    assert json.loads(json.dumps(record)) == record


def test_a_record_without_mps_says_so_by_nothing() -> None:
    record = service_report.record({"no_mps": found()}, {})
    assert all(record[key] is None for key in service_report.KEYS)
    assert record["no_mps"]["host_lane_us"] == 17.0


def test_modes_may_be_measured_one_by_one() -> None:
    first = service_report.record({"mps": found()}, {"date": "2026-12-01"})
    both = service_report.record({"no_mps": without_graphs()}, {"date": "2026-12-02"}, first)
    assert {key: value for key, value in both.items() if key != "no_mps"} == first
    assert (both["date"], both["no_mps"]["date"]) == ("2026-12-01", "2026-12-02")
    renewed = service_report.record({"mps": found("polled")}, {"date": "2026-12-03"}, both)
    assert renewed["date"] == "2026-12-03"
    assert renewed["details"]["lanes"][0]["mode"] == "polled"
    assert renewed["no_mps"] == both["no_mps"]


@pytest.mark.parametrize("append", [True, False])
def test_a_record_is_kept_only_if_that_is_asked_for(
    append: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cpu" / "service.json"
    path.parent.mkdir()
    path.write_text(json.dumps(service_report.record({"no_mps": found()}, {"date": "2026-12-01"})))
    monkeypatch.setattr(
        service, "command", lambda device, work: [sys.executable, "-c", f"print({json.dumps(found())!r})"]
    )
    service.main(["--device", "cpu", "--results", str(tmp_path), *(["--append"] if append else [])])
    assert ("no_mps" in json.loads(path.read_text())) == append


def test_table_and_plot_show_each_mode_and_what_is_not_there() -> None:
    both = {"mps": found(), "no_mps": without_graphs()}
    table = "\n".join(service_report.table(both))
    for text in ("4.00 (p99 9.00)", "1.15", "13.75", "8.25", "14.90", "armed", "polled", "no_mps: soak: wrong 0"):
        assert text in table
    graph_line = next(line for line in table.splitlines() if line.startswith("lane_in_graph_minus_local_us"))
    assert graph_line.split()[-1] == "-"
    plot = list(service_report.plot(both))
    lengths = {line.split(" #")[0].strip(): line.count("#") for line in plot}
    assert lengths["mps unary echo"] > lengths["mps stream echo"] > lengths["mps lane"]


def test_what_was_measured_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"print({json.dumps(found())!r}); print('{{', end=''); raise SystemExit(3)"
    monkeypatch.setattr(service, "command", lambda device, work: [sys.executable, "-c", program])
    with pytest.raises(SystemExit, match="cpu ended with status 3"):
        service.main(["--device", "cpu", "--results", str(tmp_path)])
    assert json.loads((tmp_path / "cpu" / "service.json").read_text())["details"]["failed"] == "ended with status 3"
    monkeypatch.setattr(service, "command", lambda device, work: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="nothing was measured"):
        service.main(["--device", "cpu", "--results", str(tmp_path)])


def test_the_best_public_kernel_is_the_fastest_exact_one_of_the_same_rows() -> None:
    assert service_lanes.best_public(service_lanes.Shape(16, 131_072, 2048)) == 14.91
    assert service_lanes.best_public(service_lanes.Shape(64, 131_072, 2048)) == 23.099
    assert service_lanes.best_public(service_lanes.Shape(3, 5, 7)) is None


def test_figures_are_percentiles_less_what_is_given() -> None:
    assert service_lanes.figures(np.arange(101.0), 10.0) == {"p50": 40.0, "p99": 89.0}


@pytest.mark.parametrize("shape", service_client.SHAPES)
def test_what_a_client_checks_can_be_right_in_one_way_only(shape: tuple[int, int, int, str]) -> None:
    rows, width, k, dtype = shape
    plain = shape in service_client.SHAPES[:2]
    bits = service_client.bits_of(rows, width, dtype, np.random.default_rng(1), plain)
    assert bits.size == rows * width
    assert plain or len(np.unique(bits)) < 100
    assert all(expected(Case(storage=bits, dtype=dtype, rows=rows, width=width, k=k, **service_client.UNIQUE)).unique)


def test_options_change_what_is_measured() -> None:
    assert service.work_of(service.parse([])) == Work()
    assert service.work_of(service.parse(["--short", "--kills", "3"])) == Work(**{**vars(SHORT), "kill_seconds": 3.0})
    assert service.work_of(service.parse(["--waits-by", "kernel"])).waits_by == "kernel"
    assert service.folder_of("cuda", "NVIDIA H200") == "h200"
    assert service.folder_of("cpu", "anything") == "cpu"


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_a_short_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.main(["--device", "cpu", "--short", "--kills", "3", "--results", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}")
    record = json.loads((tmp_path / "cpu" / "service.json").read_text())
    details = record["details"]
    for load in (details["soak"], details["kills"]):
        assert load["calls"] > 0
        assert (load["wrong"], load["failed"], load["hung"]) == (0, 0, 0)
    assert details["kills"]["killed"] > 0
    assert details["rate"]["calls_a_second"] > 0


@pytest.mark.bench
@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_short_run_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.main(["--short", "--results", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}")
    (path,) = tmp_path.glob("*/service.json")
    record = json.loads(path.read_text())
    soak = (record if "details" in record else record["no_mps"])["details"]["soak"]
    assert soak["calls"] > 0
    assert (soak["wrong"], soak["failed"], soak["hung"]) == (0, 0, 0)


def test_a_client_that_fails_is_counted(tmp_path: Path) -> None:
    load = service_load.check_answers(tmp_path / "nobody", "none", 0.1, clients=1)
    assert (load["calls"], load["failed"], load["hung"], load["killed"]) == (0, 1, 0, 0)
