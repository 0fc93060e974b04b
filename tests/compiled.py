"""What tests of compiled code share: the backends of `torch.compile`, and quiet while it compiles."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

import pytest
import torch

# Else inductor starts a process for each core, and so does each of the test processes that run beside each other.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, os.cpu_count() or 1)))

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor compiles by g++, or by what CXX names"
)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]

QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
"""torch's own, at its import of inductor."""


def compiled_anew(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The fixture of such tests: nothing compiled before or left over."""
    caplog.set_level(logging.CRITICAL, "torch.__trace")  # thousands of records, which pytest would keep
    torch.compiler.reset()
    yield
    torch.compiler.reset()
