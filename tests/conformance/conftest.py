"""The backends that every case of the suite runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance.backends import Backend, InProcess, Remote

BACKENDS = [
    "inprocess-cpu",
    "remote-cpu",
    pytest.param("inprocess-cuda", marks=pytest.mark.gpu),
    pytest.param("remote-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each way to have a request served in turn."""
    where, device = request.param.split("-")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if where == "inprocess":
        yield Backend(request.param, InProcess(device))
        return
    from topkd import Client

    server = request.getfixturevalue("server" if device == "cpu" else "cuda_server")
    client = Client(server.socket_dir)
    try:
        yield Backend(request.param, Remote(client))
    finally:
        client.close()
