"""The examples in the documentation of the public API, run against a server."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

import topkd
from tests.conftest import Server

MODULES = ("_aclient", "_arena", "_client", "errors")


@pytest.mark.parametrize("name", MODULES)
def test_examples(server: Server, client: topkd.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_SOCKET_DIR", str(server.socket_dir))
    names = {"client": client, "np": np, "topkd": topkd}
    failed, tried = doctest.testmod(importlib.import_module(f"topkd.{name}"), extraglobs=names)
    assert tried
    assert not failed
