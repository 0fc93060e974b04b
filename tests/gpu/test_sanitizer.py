"""Every compiled family, and the merge, under compute-sanitizer: no access outside, no race in shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from topkd.kernels import kernels

FAMILIES = [*(name for name in kernels() if name != "torch"), "merge"]
WATCHED = [
    *((family, "memcheck", "bfloat16 float16 float32") for family in FAMILIES),
    # Each takes as long as all of the above; f16 goes through the code of bf16.
    *((family, "racecheck", dtype) for family in FAMILIES for dtype in ("bfloat16", "float32")),
]
BEGINNING = 0x800
"""Bytes of a cluster kernel's code in which its thread 0 sets the mbarriers up; little else touches shared memory."""
RACE = re.compile(r"Warning: Race reported between .*\+0x([0-9a-f]+)\b.*\n=+ +and .*\+0x([0-9a-f]+)\b")


def unexplained(output: str) -> str:
    """Returns what racecheck says without the warnings that are known to be none.

    An mbarrier is initialised by one thread, and that thread arrives at it next. racecheck (seen on an H200, 2026)
    takes the initialisation, an instruction of the uniform datapath, for one of all 32 lanes: a race in the warp.
    """
    races = RACE.findall(output)
    known = [race for race in races if max(int(place, 16) for place in race) < BEGINNING]
    summary = f"{len(known)} hazards displayed (0 errors, {len(known)} warnings)"
    return "" if known and races == known and summary in output else output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(400)
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
    assert f"{family}: " in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    if done.returncode:
        assert (family, tool) == ("cluster", "racecheck")
        assert done.returncode == 9
        assert unexplained(done.stdout) == ""
    else:
        assert "0 errors" in done.stdout or "0 hazards" in done.stdout


def test_other_races_are_seen() -> None:
    warning = """========= Warning: Race reported between Write access at kernel_0+0x210
=========     and Read access at kernel_0+0x270 [128 hazards]
========= """
    known = (
        f"{warning}\ncluster: 44 selections\n========= RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warnings)"
    )
    assert unexplained(known) == ""
    assert unexplained(known.replace("0x270", "0x870")) != ""
    assert unexplained(known.replace("(0 errors, 1 warnings)", "(1 errors, 0 warnings)")) != ""
    assert unexplained(known.replace("Warning: Race", "Error: Race")) != ""
    assert unexplained("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)") != ""
