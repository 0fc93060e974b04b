"""What the package offers, and what importing it loads."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest
import torch

from topkd import kernels

PUBLIC = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "SelectPlan",
    "TopKResult",
    "kernels",
    "merge_topk",
    "plan",
    "precompile",
    "select_topk",
    "supports",
]
FOR_SERVERS = [
    "MergeRequest",
    "SelectRequest",
    "check_batch_overlap",
    "choose",
    "compiles",
    "run_merge",
    "run_select",
    "run_select_batch",
    "validate_merge",
    "validate_select",
    "warm_select",
]


def test_public_names() -> None:
    assert kernels.__all__ == PUBLIC
    for name in PUBLIC + FOR_SERVERS:
        assert getattr(kernels, name).__doc__


def test_documented_examples() -> None:
    assert doctest.testmod(kernels).failed == 0


def test_import_loads_no_compiler() -> None:
    code = "import sys, topkd.kernels; sys.exit(any(name.split('.')[0] == 'cutlass' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_families() -> None:
    assert "torch" in kernels.kernels()
    assert "auto" not in kernels.kernels()


def test_supports() -> None:
    scores = torch.zeros(2, 8)
    assert kernels.supports("torch", scores, 3) is None
    assert kernels.supports("auto", scores, 3, order="index", ties="lowest") is None
    for name in ("fastest", "", "Torch"):
        unmet = kernels.supports(name, scores, 3)
        assert unmet is not None
        assert repr(name) in unmet
    with pytest.raises(TypeError, match="kernel"):
        kernels.supports(None, scores, 3)  # type: ignore[arg-type]
