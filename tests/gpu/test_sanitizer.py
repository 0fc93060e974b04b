"""Every compiled family, and the merge, under compute-sanitizer: no access outside, no race in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from topkd.kernels import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]
FAMILIES = [*(name for name in kernels() if name != "torch"), "merge"]
WATCHED = [
    *((family, "memcheck", "bfloat16 float16 float32") for family in FAMILIES),
    # Each takes as long as all of the above; f16 goes through the code of bf16.
    *((family, "racecheck", dtype) for family in FAMILIES for dtype in ("bfloat16", "float32")),
]


@pytest.mark.parametrize(("family", "tool", "dtypes"), WATCHED)
def test_nothing_found(family: str, tool: str, dtypes: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # cuda-bindings asks the driver for functions that it lacks: calls that fail, but no access to memory.
    watched = ["--kernel-name-exclude", "kns=at::"] if tool == "racecheck" else ["--report-api-errors", "no"]
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        *watched,
        sys.executable,
        "-m",
        "tests.gpu.sanitized",
    ]
    done = subprocess.run([*command, family, *dtypes.split()], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"{family}: " in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
