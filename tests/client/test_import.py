from __future__ import annotations

import subprocess
import sys

import pytest

import topkd
from topkd import errors

HEAVY = ("torch", "cutlass", "cuda", "topkd.kernels", "topkd.server")


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd="/")
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import topkd").intersection((*HEAVY, "grpc", "numpy"))


def test_making_and_using_a_client_loads_neither_torch_nor_cuda() -> None:
    code = """
import topkd, numpy
for name in topkd.__all__:
    getattr(topkd, name)
client = topkd.Client("/nonexistent", attach_timeout=0.1)
try:
    client.select_topk(numpy.zeros((1, 4), numpy.float32), 1)
except topkd.UnavailableError:
    pass
"""
    assert not loaded_by(code).intersection(HEAVY)


def test_operators_for_torch_are_a_module_of_their_own() -> None:
    assert {"torch", "topkd.kernels"} <= loaded_by("import topkd.torch_ops")


def test_every_public_name_is_there() -> None:
    assert topkd.__all__ == sorted(topkd.__all__, key=lambda name: (name.startswith("_"), name))
    for name in topkd.__all__:
        assert getattr(topkd, name) is not None
    assert set(errors.__all__) <= set(topkd.__all__)
    assert set(dir(topkd)) >= set(topkd.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        topkd.nothing  # noqa: B018 - the access is the test
