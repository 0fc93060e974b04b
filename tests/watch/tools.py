"""What these tests need beside the development tools. `python -m tests.watch.tools` fails if something is missing."""

from __future__ import annotations

import importlib.util
import shutil
import sys

PROGRAMS = {"promtool": "prometheus", "prometheus": "prometheus", "chromium": "chromium"}
"""Programs, and the Debian packages that have them."""
MODULES = {"grafana_foundation_sdk": "grafana-foundation-sdk", "playwright": "playwright", "yaml": "pyyaml"}
"""Modules, and the PyPI packages that have them; exact versions are in constraints-watch.txt."""


def missing() -> list[str]:
    """Returns what is not installed, worded for people."""
    lacking = [f"{name} (apt install {package})" for name, package in PROGRAMS.items() if shutil.which(name) is None]
    lacking += [f"{name} (pip install {p})" for name, p in MODULES.items() if importlib.util.find_spec(name) is None]
    return lacking


if __name__ == "__main__":
    lacking = missing()
    if lacking:
        sys.exit("watch-check cannot run here; missing: " + ", ".join(lacking))
