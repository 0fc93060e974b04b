"""`Latch` and `Answer` by their own PTX, run by the interpreter in `ptx`: what they look at, what they store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import ptx
from tests.kernels.emulated_memory import place
from topkd.kernels import Answer, Latch
from topkd.kernels._cute_compile import compile_kernel, installed

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.filterwarnings("default"),
]


def run(folder: Path, kernel: tuple[str, str, Any], arch: str, memory: ptx.GlobalMemory, arguments: list[int]) -> None:
    """Runs a kernel of one warp."""
    compile_kernel(*kernel, arch, f"--keep-ptx --dump-dir {folder}")
    (text,) = folder.glob("*.ptx")
    ptx.Cta(ptx.parse(text.read_text()), memory, arguments, 32, 0).run(0)


@pytest.mark.parametrize("gate", [0, 41, 42, 43, 2**63 - 1])
def test_a_latch_marks_what_a_gate_has_given_up(tmp_path: Path, gate: int) -> None:
    memory = ptx.GlobalMemory()
    spare = place(memory, torch.tensor([7, 7]), True)
    arguments = [place(memory, torch.tensor([gate]), False), 42, spare]
    run(tmp_path, ("latch_kernel", "Latch", ()), "sm_90a", memory, arguments)
    assert memory.get(spare, np.int64, 2).tolist() == [int(gate >= 42), 7]


@pytest.mark.parametrize(("arch", "recent"), [("sm_80", False), ("sm_90a", True)])
@pytest.mark.parametrize("mark", [0, 1])
def test_an_answer_is_given_without_a_mark(tmp_path: Path, mark: int, arch: str, recent: bool) -> None:
    memory = ptx.GlobalMemory()
    spare = place(memory, torch.tensor([mark, 40]), True)
    memory.readable[spare - memory.BASE :][:16] = True
    words = [place(memory, torch.tensor([7, 7]), True) for _ in range(5)]
    words.append(place(memory, torch.tensor([3, 7]), True))  # the echo of an earlier call
    memory.readable[words[4] - memory.BASE :][:8] = True
    run(tmp_path, ("answer_kernel", "Answer", (recent,)), arch, memory, [spare, *words])
    assert memory.get(spare, np.int64, 2).tolist() == [mark, 40 if mark else 41]
    for word, want in zip(words, (0, 8, 41, 41, 7, 7), strict=True):
        assert memory.get(word, np.int64, 2).tolist() == [(3 if word == words[5] else 7) if mark else want, 7]


def test_there_is_code_for_the_oldest_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_CACHE_DIR", str(tmp_path))
    for arch in ("sm_80", "sm_100a"):
        Answer().precompile(arch)
        Latch().precompile(arch)
