"""The `split_merge` kernels' own PTX, run by the interpreter in `ptx`, against the oracle; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.case import Case
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import ptx
from tests.kernels.test_radix_wide_emulated import SHARED, Emulated
from topkd.kernels import SelectRequest
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels.radix_wide import DTYPES
from topkd.kernels.split_merge import cut

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

PROCESSORS = 24


class Split(Emulated):
    """`select_topk` by the interpreted kernels, on CPU tensors."""

    def _pair(self, dtype: str, grouped: bool) -> tuple[ptx.Kernel, ptx.Kernel]:
        """Both kernels of a variant."""
        folder = self.folder / f"{dtype}-{grouped}"
        if not folder.exists():
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("split_merge_kernel", "SplitMerge", (dtype, grouped), self.arch, options)
        (text,) = folder.glob("*.ptx")
        head, *entries = re.split(r"(?=\.visible \.entry)", text.read_text())
        parts, merge = sorted(entries, key=lambda entry: "SplitParts" not in entry.split("(", 1)[0])
        return ptx.parse(head + parts), ptx.parse(head + merge)

    def _launch(self, request: SelectRequest, memory: ptx.GlobalMemory, arguments: tuple[int, ...]) -> None:
        *fields, rows = arguments
        parts, elements = cut(rows, request.element_bound, request.k, PROCESSORS)
        size = rows * parts * request.k
        values = memory.add(np.zeros(size * request.input.element_size(), np.uint8), writable=True)
        indices = memory.add(np.zeros(size * 4, np.uint8), writable=True)
        whole = [*fields, values, indices, parts, elements]
        first, second = self._pair(DTYPES[request.input.dtype], request.group > 1 and not request.pooled)
        cta = ptx.Cta(first, memory, whole, 1024, SHARED)
        for block in range(rows * parts):
            cta.run(block)
        cta = ptx.Cta(second, memory, whole, 1024, SHARED)
        for row in range(rows):
            cta.run(row)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return Backend("emulated", Split(tmp_path_factory.mktemp("ptx")))


def elements(case: Case) -> int:
    """The elements that a row of a case can have."""
    members = case.width * case.group if case.pooled else case.width
    members = members if case.max_length is None else min(members, case.max_length)
    return -(-members // case.group)


SMALL = {
    name: case
    for name, case in directed().items()
    if case.rows * case.width <= 3000 and 2 * case.k <= elements(case) and case.rows
}


@pytest.mark.parametrize("name", list(SMALL)[::8])
def test_directed(emulated: Backend, name: str) -> None:
    emulated.run(SMALL[name])


def cases() -> Iterator[tuple[str, Case]]:
    """Rows of several parts, that end in any of them, with what the merge has to add."""
    lengths = ints(0, 1, 30, 63, 64, 65, 128, 129, 500, 999, 1000)
    for order, ties in (("index", "highest"), ("value", "lowest")):
        made = rows_of("levels", 11, 1000, 30, order=order, ties=ties, values=True, lengths=lengths)
        yield f"lengths-{order}", made
    yield "pinned", rows_of("nan", 11, 1000, 30, order="value", values=True, pin_newest=True, lengths=lengths)
    yield "dropped", rows_of("few-finite", 2, 1000, 100, order="index", values=True, drop_neg_inf=True)
    yield "smallest", rows_of("specials", 2, 1000, 100, order="value", values=True, largest=False, dtype="float16")
    ordered: dict[str, Any] = {"ties": "lowest", "values": True, "pin_newest": True, "row_starts": ints(3, 0)}
    yield "groups", rows_of("any-bits", 2, 4003, 20, order="value", group=8, **ordered)
    expanded: dict[str, Any] = {"ties": "lowest", "expand": True, "dtype": "float32"}
    yield "members", rows_of("any-bits", 1, 4003, 20, order="index", group=4, **expanded)
    yield "offsets", rows_of("plateau", 2, 1000, 40, order="index", ties="highest", row_offsets=ints(7, 2**31 - 500))
    yield "long", rows_of("one-bin", 1, 30000, 300, order="index", ties="lowest", values=True, dtype="float32")


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_cases(emulated: Backend, name: str) -> None:
    emulated.run(CASES[name])
