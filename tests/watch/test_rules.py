"""The rules: well-formed, unit-tested by promtool, evaluated by a live Prometheus. The metrics: well named."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from typing import Any

import pytest
import yaml

from tests.e2e.servers import Running
from tests.e2e.test_fleet import Fleet
from tests.watch.live import ROOT, RULES, Prometheus

pytestmark = pytest.mark.watch

RUNBOOKS = ROOT / "deploy/runbooks"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALL: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in ALL if "record" in rule}
NEEDS_A_DAY = {"kernel:topkd_kernel_seconds:p99_baseline"}
"""Rules that a young Prometheus has no data for; promtool's tests show them."""


def promtool(*arguments: str, text: str | None = None) -> None:
    result = subprocess.run(
        ["promtool", *arguments], cwd=RULES.parent, input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout + result.stderr


def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", RULES.name)
    promtool("check", "config", "prometheus.yml")


def test_promtool_passes_the_unit_tests() -> None:
    promtool("test", "rules", "topkd.test.yml")


def test_every_rule_has_a_unit_test() -> None:
    tests = yaml.safe_load((RULES.parent / "topkd.test.yml").read_text())["tests"]
    fired = {
        case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]
    }  # fmt: skip
    assert fired == set(ALERTS)
    asked = " ".join(case["expr"] for test in tests for case in test.get("promql_expr_test", []))
    used = " ".join(rule["expr"] for rule in ALL)
    assert [name for name in RECORDED if name not in asked and name not in used] == []


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_has_a_runbook_and_says_what_is_wrong(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert alert["annotations"]["runbook"] == f"deploy/runbooks/{name}.md"
    page = (RUNBOOKS / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
        "What it does to engines",
        "What to look at, and what to do",
    ]
    assert re.findall(r"^\d+\. ", page, re.MULTILINE)


def test_there_is_no_runbook_without_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERTS)


def test_the_metrics_are_named_by_the_rules_of_prometheus(busy: Running, busy_fleet: Fleet) -> None:
    for server in (busy, busy_fleet):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as answer:
            promtool("check", "metrics", text=answer.read().decode())


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("record") or rule["alert"])
def test_every_rule_evaluates_live(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    samples = prometheus.query(rule["expr"])
    if "record" in rule and rule["record"] not in NEEDS_A_DAY:
        instances = {sample["metric"]["instance"] for sample in samples}
        assert instances == prometheus.targets, "no data under load of some server"
        recorded = prometheus.query(rule["record"])
        assert {sample["metric"]["instance"] for sample in recorded} == prometheus.targets, "it is not recorded"
        assert {sample["metric"].get("device") for sample in recorded} >= {None, "cpu-1"}, "it loses the device"


def test_prometheus_evaluates_them_itself_without_an_error(prometheus: Prometheus) -> None:
    found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(ALL)
    assert [rule["name"] for rule in found if rule["health"] != "ok" or rule.get("lastError")] == []


def test_a_busy_server_that_is_well_raises_no_alert(prometheus: Prometheus) -> None:
    expected = {"TopkdClientsReaped"}  # the load's mayflies
    firing = {sample["metric"]["alertname"] for sample in prometheus.query('ALERTS{alertname=~"Topkd.*"}')}
    assert firing <= expected
