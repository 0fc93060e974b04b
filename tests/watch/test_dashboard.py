"""The Grafana dashboard: as Grafana's schema has it, and every panel's query gives data under load."""

from __future__ import annotations

import copy
import json
import re
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from playwright.sync_api import Browser

from tests.e2e.servers import Running
from tests.e2e.test_fleet import Fleet
from tests.watch import panels
from tests.watch.browser import opened
from tests.watch.dashboard import DASHBOARD, PANELS, ROWS, expression, targets
from tests.watch.live import Prometheus

pytestmark = pytest.mark.watch

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TARGETS = dict(targets())


def lost(source: Any, through: Any, path: str = "") -> list[str]:
    """Returns where a document differs from its source; what it has besides are defaults."""
    if isinstance(source, dict) and isinstance(through, dict):
        pairs = [(f"{path}.{key}", value, through.get(key, "(lost)")) for key, value in source.items()]
    elif isinstance(source, list) and isinstance(through, list) and len(source) == len(through):
        pairs = [(f"{path}[{place}]", *pair) for place, pair in enumerate(zip(source, through, strict=True))]
    else:
        return [] if source == through else [f"{path}: {source!r} became {through!r}"]
    return [each for place, one, other in pairs for each in lost(one, other, place)]


def not_in_the_schema(document: dict[str, Any]) -> list[str]:
    """Returns what is lost on a dashboard's way through the classes that Grafana makes from its schema."""
    plugins.register_default_plugins()
    return lost(document, json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(document)))))


def test_every_key_is_one_of_grafanas_schema() -> None:
    assert not_in_the_schema(DASHBOARD) == []


def test_the_schema_check_sees_keys_that_are_wrong() -> None:
    wrong = copy.deepcopy(DASHBOARD)
    wrong["titel"] = "topkd"
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    wrong["panels"][1]["targets"][0]["legend"] = "x"
    assert len(not_in_the_schema(wrong)) == 3


def test_the_data_source_is_a_variable_everywhere() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert set(variables) == {"datasource", "job", "instance", "device"}
    of_panels = [panel["datasource"] for panel in PANELS]
    of_targets = [target["datasource"] for target in TARGETS.values()]
    of_others = [each["datasource"] for each in DASHBOARD["annotations"]["list"] + DASHBOARD["templating"]["list"][1:]]
    assert all(each == DATASOURCE for each in of_panels + of_targets + of_others)


def test_rows_and_panels() -> None:
    assert ROWS == ["Service", "Kernels", "Lanes and order", "Sessions", "Host"]
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"].endswith(".")
        assert panel["targets"]
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, f"{one} and {other} overlap"
        assert one["x"] + one["w"] <= 24


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_query_gives_data(prometheus: Prometheus, busy: Running, busy_fleet: Fleet, name: str) -> None:
    """Of a server of one device, and of one of several: of each, and of the device that is busy."""
    target = TARGETS[name]
    labels = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
    for server, devices in ((busy, [".*"]), (busy_fleet, [".*", "cpu-1"])):
        for device in devices:
            chosen = {"instance": f"127.0.0.1:{server.metrics_port}", "device": device}
            query = expression(target["expr"], **chosen, __rate_interval="1m")  # Grafana's at a scrape in 15 s
            samples = prometheus.query(query)
            assert samples, query
            for label in labels if server is busy_fleet else labels - {"device"}:
                assert all(sample["metric"].get(label) for sample in samples), f"{label} is no label of {query}"


def test_the_annotation_and_the_variables_evaluate(prometheus: Prometheus) -> None:
    prometheus.query(expression(DASHBOARD["annotations"]["list"][0]["expr"]))
    [of_devices] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "device"]
    found = prometheus.query(re.sub(r"label_values\((.*), device\)", r"\1", expression(of_devices["query"]["query"])))
    assert {sample["metric"].get("device") for sample in found} == {None, "cpu-0", "cpu-1"}
    for variable in DASHBOARD["templating"]["list"][1:]:
        text = expression(variable["query"]["query"])
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", text)
        assert match, text
        values: Any = {sample["metric"].get(match[2]) for sample in prometheus.query(match[1])}
        assert values
        assert None not in values or match[2] == "device"


def test_panels_of_the_load_show_more_than_zeros(prometheus: Prometheus) -> None:
    """Where the load does something, its panel is not flat."""
    moving = ["Requests/A", "Rows/A", "Device time, p99/A", "Kernel calls/A", "Attached and ended/A", "Bytes/A"]
    moving += ["Lanes/A", "Calls of lanes/A", "Sessions/A", "Time in the queue/B", "Wait on the device/A"]
    moving += ["Processor time/A", "Regions and plans/B"]
    for name in moving:
        samples = prometheus.query(expression(TARGETS[name]["expr"]))
        assert any(float(sample["value"][1]) > 0 for sample in samples), name


def test_the_panels_of_the_pictures_are_drawn(browser: Browser, prometheus: Prometheus) -> None:
    with panels.served(prometheus, 10) as address, opened(browser, address) as (page, troubles):
        page.wait_for_selector("body[data-drawn]", timeout=30_000)
        assert page.locator("figure").count() == len(PANELS)
        assert page.locator("h2").all_inner_texts() == ROWS
        drawn = [panel for panel in PANELS if panel["type"] in ("timeseries", "heatmap")]
        assert page.locator("figure canvas").count() == len(drawn)
        assert troubles == []
