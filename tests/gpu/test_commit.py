"""`Commit` on a GPU: what it copies, what it leaves alone, and the gate."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from topkd.kernels import Commit  # noqa: E402 - needs torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
POISON = 0x5A
SHAPES = [(1, 1), (1, 2048), (3, 7), (64, 2048), (5, 4097), (1000, 33), (2, 300_001)]


@pytest.fixture(scope="module")
def commit() -> Commit:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = Commit()
    made.warm(torch.device("cuda"))
    return made


@pytest.fixture(scope="module")
def gate() -> Any:
    """A gate in host memory, as the server has it."""
    return torch.zeros(1, dtype=torch.int64, pin_memory=True)


def target(rows: int, columns: int, dtype: Any, padding: int, skew: int) -> tuple[Any, Any]:
    """Returns poisoned bytes, and a target in them: rows `padding` elements apart, `skew` elements from the start."""
    whole = torch.full(((skew + rows * (columns + padding) + 64) * dtype.itemsize,), POISON, dtype=torch.uint8).cuda()
    return whole, whole.view(dtype).as_strided((rows, columns), (columns + padding, 1), skew)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_it_copies_every_unit_and_nothing_else(commit: Commit, gate: Any, rows: int, columns: int, dtype: Any) -> None:
    for padding in (0, 1, 5, 8):
        for skew in (0, 1, 2, 4):
            source = torch.randint(-(2**15), 2**15, (rows, columns), device="cuda").to(dtype)
            whole, out = target(rows, columns, dtype, padding, skew)
            want = torch.full_like(whole, POISON)
            want.view(dtype).as_strided(out.shape, out.stride(), skew).copy_(source)
            gate[0] = 41
            commit(source, out, gate.data_ptr(), 42)
            torch.cuda.synchronize()
            assert torch.equal(whole, want), (padding, skew)


@pytest.mark.parametrize("raised", [42, 43, 1 << 62])
def test_at_or_above_the_ticket_the_gate_stops_all_of_it(commit: Commit, gate: Any, raised: int) -> None:
    for rows, columns in SHAPES:
        source = torch.ones((rows, columns), dtype=torch.int32, device="cuda")
        whole, out = target(rows, columns, torch.int32, 3, 1)
        gate[0] = raised
        commit(source, out, gate.data_ptr(), 42)
        torch.cuda.synchronize()
        assert bool((whole == POISON).all())


def test_the_gate_is_looked_at_when_the_copy_begins(commit: Commit, gate: Any) -> None:
    source = torch.ones((64, 2048), dtype=torch.int32, device="cuda")
    for raised in (0, 7):
        whole, out = target(64, 2048, torch.int32, 0, 0)
        gate[0] = 0
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        commit(source, out, gate.data_ptr(), 7)
        gate[0] = raised  # by the CPU, while the stream is not there yet
        torch.cuda.synchronize()
        assert bool((out == 1).all()) is (raised == 0)
        assert bool((whole == POISON).all()) is (raised == 7)


def test_nothing_to_copy_is_no_launch(commit: Commit, gate: Any) -> None:
    for shape in ((0, 5), (5, 0)):
        empty = torch.empty(shape, dtype=torch.int32, device="cuda")
        commit(empty, empty, gate.data_ptr(), 1)
    torch.cuda.synchronize()
