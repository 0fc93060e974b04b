"""Launches that can be given up, of every family and form of output: what is written, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkd.kernels import Answer, Latch, run_select_batch, select_topk, spare_bytes, supports, validate_select

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
POISON = 0x5A
TICKET = 42
UNTOUCHED = POISON * 0x01010101
SHAPES: dict[str, list[tuple[torch.dtype, int, int, int]]] = {
    "cluster": [
        (torch.bfloat16, 3, 40_000, 300),
        (torch.float16, 1, 131_072, 2048),
        (torch.float32, 3, 40_000, 300),
        (torch.float32, 140, 9_000, 1000),
        (torch.bfloat16, 2, 200, 300),
    ],
    "radix_register": [(torch.bfloat16, 5, 20_000, 600), (torch.float32, 3, 9_001, 100), (torch.float16, 2, 50, 80)],
    "small": [(torch.bfloat16, 7, 3_000, 64), (torch.float32, 300, 900, 33)],
    "radix_wide": [(torch.bfloat16, 5, 70_000, 2048), (torch.float32, 2, 50_000, 9_000), (torch.float16, 2, 50, 80)],
    "split_merge": [(torch.bfloat16, 2, 200_000, 2048), (torch.float32, 1, 300_001, 500)],
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "any": {"order": "any"},
    "smallest": {"largest": False},
    "int64": {"index_dtype": torch.int64},
    "values": {"values": True},
    "by value": {"order": "value", "values": True},
    "offsets": {"row_offsets": True},
    "pages": {"page_table": True},
    "groups": {"group": 8, "values": True},
    "expanded": {"group": 8, "expand": True, "pin_newest": True, "order": "any"},
    "pinned": {"pin_newest": True},
    "short": {"lengths": 20},
}
CASES = [(family, *shape, form) for family, shapes in SHAPES.items() for shape in shapes for form in FORMS]


class Outputs:
    """Outputs in the middle of poisoned memory, and spare memory with poison behind it."""

    def __init__(self, rows: int, columns: int, values: bool, index: torch.dtype, dtype: torch.dtype) -> None:
        self.wholes: list[torch.Tensor] = []
        self.indices = self._place(rows, columns, index)
        self.values = self._place(rows, columns, dtype) if values else None
        self.used = spare_bytes(columns)
        self.spare = torch.full((self.used + 256,), POISON, dtype=torch.uint8, device="cuda")
        self.spare[:8] = 0

    def _place(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize
        whole = torch.full(((rows * (columns + 3) + 64) * size,), POISON, dtype=torch.uint8, device="cuda")
        self.wholes.append(whole)
        return whole.view(dtype).as_strided((rows, columns), (columns + 3, 1), 5)

    def mark(self, value: int) -> None:
        self.spare[:8].view(torch.int64)[0] = value

    def untouched(self) -> bool:
        return all(bool((whole == POISON).all()) for whole in self.wholes)

    def same(self, other: Outputs) -> bool:
        return all(torch.equal(*pair) for pair in zip(self.wholes, other.wholes, strict=True))

    def spare_used(self) -> bool:
        assert bool((self.spare[self.used :] == POISON).all()), "written behind the spare memory"
        assert bool((self.spare[8:16] == POISON).all()), "written before the cells"
        return not bool((self.spare[16:] == POISON).all())


class Made:
    """A selection: its request for given outputs."""

    def __init__(self, family: str, dtype: torch.dtype, rows: int, width: int, k: int, form: str) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        generator = torch.Generator("cuda").manual_seed(hash((rows, width, k)) % 2**31)
        self.scores = torch.randn(rows, width, device="cuda", generator=generator).to(dtype)
        options: dict[str, Any] = {"order": "index", "ties": "lowest", **FORMS[form]}
        if options.get("group") and family == "cluster":
            self.scores = self.scores if dtype != torch.float32 else self.scores.to(torch.bfloat16)
            options.update(order="any", ties="any")
        if options.get("row_offsets"):
            options["row_offsets"] = torch.arange(rows, dtype=torch.int32, device="cuda") * 1000
        if options.get("page_table"):
            pages = -(-width // 64)
            options["page_table"] = torch.randint(0, 1 << 20, (rows, pages), device="cuda", dtype=torch.int32)
            options["page_size"] = 64
        if options.get("lengths"):
            options["lengths"] = torch.full((rows,), options["lengths"], dtype=torch.int32, device="cuda")
        self.k, self.options, self.kernel = min(k, width // options.get("group", 1)), options, family
        unmet = supports(family, self.scores, self.k, **options)
        if unmet is not None:
            pytest.skip(unmet)
        self.fixed = options["order"] != "any"

    def outputs(self) -> Outputs:
        group = self.options.get("group", 1) if self.options.get("expand") else 1
        index = self.options.get("index_dtype", torch.int32)
        return Outputs(len(self.scores), self.k * group, bool(self.options.get("values")), index, self.scores.dtype)

    def run(self, out: Outputs, spare: bool = True) -> None:
        request = validate_select(
            self.scores, self.k, kernel=self.kernel, out_indices=out.indices, out_values=out.values, **self.options
        )
        run_select_batch([request], spare=out.spare.data_ptr() if spare else 0)

    def check(self, out: Outputs) -> None:
        """Compares outputs with those of the `torch` family, as sets where the order is open."""
        options = {**self.options, "order": "index" if self.options["order"] == "any" else self.options["order"]}
        want = select_topk(self.scores, self.k, kernel="torch", **{**options, "ties": "lowest"})
        if self.fixed:
            assert torch.equal(out.indices, want.indices)
            assert out.values is None or (want.values is not None and torch.equal(out.values, want.values))
        elif self.options["ties"] == "lowest":
            assert torch.equal(out.indices.sort(dim=1).values, want.indices.sort(dim=1).values)
        else:  # any of the ties
            assert out.values is None or want.values is not None
            if out.values is not None and want.values is not None:
                assert torch.equal(out.values.sort(dim=1).values, want.values.sort(dim=1).values)


@pytest.mark.parametrize(("family", "dtype", "rows", "width", "k", "form"), CASES)
def test_a_mark(family: str, dtype: torch.dtype, rows: int, width: int, k: int, form: str) -> None:
    made = Made(family, dtype, rows, width, k, form)
    plain, unmarked, marked = made.outputs(), made.outputs(), made.outputs()
    made.run(plain, spare=False)
    made.run(unmarked)
    marked.mark(1)
    made.run(marked)
    torch.cuda.synchronize()
    made.check(plain)
    made.check(unmarked)
    if made.fixed:
        assert unmarked.same(plain)
    assert not unmarked.spare_used()
    assert marked.untouched()
    assert marked.spare_used()


FIRST = [(family, *shapes[0]) for family, shapes in SHAPES.items()]


@pytest.fixture(scope="module")
def gate() -> torch.Tensor:
    """A word in host memory, as the server has it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.zeros(1, dtype=torch.int64, pin_memory=True)


@pytest.mark.parametrize(("family", "dtype", "rows", "width", "k"), FIRST)
def test_a_gate_that_is_raised_while_the_stream_is_not_there_yet(
    gate: torch.Tensor, family: str, dtype: torch.dtype, rows: int, width: int, k: int
) -> None:
    made, latch = Made(family, dtype, rows, width, k, "plain"), Latch()
    latch.warm(made.scores.device)
    for raised in (0, TICKET - 1, TICKET, 2**63 - 1):
        out = made.outputs()
        gate[0] = 0
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        latch(gate.data_ptr(), TICKET, out.spare.data_ptr(), out.spare.device)
        made.run(out)
        gate[0] = raised
        torch.cuda.synchronize()
        assert out.untouched() is (raised >= TICKET)
        assert out.spare_used() is (raised >= TICKET)
        if raised < TICKET:
            made.check(out)


@pytest.mark.parametrize(("family", "dtype", "rows", "width", "k"), FIRST)
def test_a_mark_that_is_set_while_kernels_run(family: str, dtype: torch.dtype, rows: int, width: int, k: int) -> None:
    """Each thread looks for itself: every cell is right or untouched, and nothing hangs."""
    made = Made(family, dtype, rows, width, k, "plain")
    whole, other = made.outputs(), torch.cuda.Stream()
    made.run(whole)
    mixed = 0
    for attempt in range(30):
        out = made.outputs()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000)
        made.run(out)
        with torch.cuda.stream(other):
            torch.cuda._sleep(100_000 + 1000 * attempt)
            out.mark(1)
        torch.cuda.synchronize()
        written = out.indices != UNTOUCHED
        assert bool((out.indices == whole.indices)[written].all())
        mixed += bool(written.any()) and not bool(written.all())
    print(f"{family}: {mixed} of 30 were written in part")


def test_an_answer_is_given_unless_the_launch_was_given_up(gate: torch.Tensor) -> None:
    answer = Answer()
    answer.warm(torch.device("cuda"))
    words = torch.full((7, 8), 7, dtype=torch.int64, pin_memory=True)
    spare = torch.tensor([0, 40], dtype=torch.int64, device="cuda")
    at = tuple(words[line].data_ptr() for line in range(6))
    for mark, want in ((0, [0, 8, 41, 41, 7, 7]), (1, [7] * 6), (0, [0, 8, 42, 42, 7, 7])):
        words.fill_(7)
        spare[0] = mark
        answer(spare.data_ptr(), at, spare.device)
        torch.cuda.synchronize()
        assert words[:6, 0].tolist() == want
        assert words.sum() == sum(want) + 7 * 50
        assert spare.tolist() == [mark, want[2] if not mark else 41]


def test_a_mark_is_for_every_job_of_a_table() -> None:
    for family in ("radix_wide", "split_merge"):
        made = Made(family, torch.bfloat16, 2, 100_000, 500, "values")
        for mark in (0, 1):
            outs = [made.outputs() for _ in range(3)]
            requests = [
                validate_select(
                    made.scores, made.k, kernel=family, out_indices=out.indices, out_values=out.values, **made.options
                )
                for out in outs
            ]
            outs[0].mark(mark)
            run_select_batch(requests, spare=outs[0].spare.data_ptr())
            torch.cuda.synchronize()
            for out in outs:
                assert out.untouched() is bool(mark)
                if not mark:
                    made.check(out)


def test_what_does_more_than_enqueue_takes_no_spare_memory() -> None:
    made = Made("torch", torch.float32, 2, 1000, 8, "plain")
    out = made.outputs()
    with pytest.raises(RuntimeError, match="torch"):
        made.run(out)
    torch.cuda.synchronize()
    assert out.untouched()
