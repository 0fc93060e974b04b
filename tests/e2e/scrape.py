"""The metrics page, read as Prometheus reads it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Samples:
    """Returns every sample of the page by name and labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)  # no proxy comes between
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} is on the page twice"
            found[key] = sample.value
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    """Returns the sum of a metric's samples that have these labels; 0 where there is none."""
    wanted = set(labels.items())
    return sum(value for (sample, pairs), value in samples.items() if sample == name and wanted <= set(pairs))


def wait_for(port: int, wanted: Mapping[str, float], timeout: float = 5.0, **labels: str) -> Samples:
    """Waits until metrics have exactly these totals and returns the page; workers' figures come with a delay."""
    deadline = time.monotonic() + timeout
    while True:
        samples = scrape(port)
        seen = {name: total(samples, name, **labels) for name in wanted}
        if seen == wanted:
            return samples
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout} s the metrics are {seen}, not {dict(wanted)}")
        time.sleep(0.02)
