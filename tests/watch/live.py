"""Real processes for these tests: Prometheus on loopback, and engines that call a server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml

from tests.e2e import processes

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/topkd.rules.yml"
TEST_INTERVAL = "1s"


class Load:
    """Engines at work on a server; see tests/watch/load.py."""

    def __init__(self, socket_dir: Path, engines: int = 2) -> None:
        self._command = [sys.executable, "-m", "tests.watch.load", str(socket_dir), str(engines)]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.poll() is None, "the load ended by itself"
        os.killpg(self.process.pid, signal.SIGKILL)  # with the clients that it has started
        self.process.wait(10)


class Prometheus:
    """A Prometheus with the committed configuration, but for the targets' ports and the intervals."""

    def __init__(self, folder: Path, *target_ports: int) -> None:
        self.folder = folder
        self.targets = {f"127.0.0.1:{port}" for port in target_ports}
        self.port = processes.free_port()
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": TEST_INTERVAL, "evaluation_interval": TEST_INTERVAL}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": sorted(self.targets)}]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Self:
        flags = {"config.file": self.folder / "prometheus.yml", "storage.tsdb.path": self.folder / "data"}
        flags["web.listen-address"] = f"127.0.0.1:{self.port}"
        command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
        with (self.folder / "log").open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        processes.wait_until(self._is_ready, 60, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError):
            return bool(self._get("/-/ready"))
        return False

    def _get(self, path: str, **parameters: str) -> bytes:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}?{query}", timeout=30) as answer:
            body: bytes = answer.read()
        return body

    def ask(self, path: str, **parameters: str) -> Any:
        """Calls a method of the HTTP API and returns its data; HTTPError if Prometheus refuses it."""
        answer = json.loads(self._get(f"/api/v1/{path}", **parameters))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluates an expression now and returns its samples that are numbers."""
        data = self.ask("query", query=expression)
        found = data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]
        return [sample for sample in found if sample["value"][1] != "NaN"]

    def query_range(self, expression: str, seconds: int, step: int = 1) -> list[dict[str, Any]]:
        """Evaluates an expression over the last seconds."""
        now = math.floor(time.time())  # so that the points of several queries are at the same times
        parameters = {"start": str(now - seconds), "end": str(now), "step": str(step)}
        found: list[dict[str, Any]] = self.ask("query_range", query=expression, **parameters)["result"]
        return found

    def wait_for_scrapes(self, count: int) -> None:
        """Waits until every target has been scraped so often under load."""
        wanted = f"count_over_time(topkd_rows_total[5m]) >= {count} and increase(topkd_rows_total[5m]) > 0"
        processes.wait_until(
            lambda: {sample["metric"]["instance"] for sample in self.query(wanted)} == self.targets,
            180,
            f"{count} scrapes of each",
        )
