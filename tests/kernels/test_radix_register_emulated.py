"""The `radix_register` kernel's own PTX, run by the interpreter in `ptx`, against the oracle; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.case import Case
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import ptx
from tests.kernels.test_radix_wide_emulated import Emulated
from tests.near_rows import KINDS, near_cases
from tests.value_rows import COUNTS, VALUE_KINDS, case_of
from topkd.kernels import SelectRequest
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels.radix_register import ANY, RadixRegisterFamily, Variant, facts_of

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

SHARED = 84 * 1024
FAMILY = RadixRegisterFamily()


class Registers(Emulated):
    """`select_topk` by the interpreted kernel, on CPU tensors."""

    def __init__(self, folder: Path, arch: str = "sm_90a") -> None:
        super().__init__(folder, arch)
        self.parsed: dict[Variant, ptx.Kernel] = {}

    def _parsed(self, variant: Variant) -> ptx.Kernel:
        if variant not in self.parsed:
            folder = self.folder / "-".join(map(str, (*facts_of(variant), variant.arch)))
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("radix_register_kernel", "RadixRegister", facts_of(variant), variant.arch, options)
            (text,) = folder.glob("*.ptx")
            self.parsed[variant] = ptx.parse(text.read_text())
        return self.parsed[variant]

    def _launch(self, request: SelectRequest, memory: ptx.GlobalMemory, arguments: tuple[int, ...]) -> None:
        assert FAMILY.unmet_shape(request) is None
        variant = FAMILY.variant_on(request, self.arch)
        *rest, rows = arguments
        path = ANY if request.order == "any" and request.ties == "any" else 0
        whole = [*rest, path, request.length_bound]
        cta = ptx.Cta(self._parsed(variant), memory, whole, variant.shape.threads, SHARED)
        for row in range(rows):
            cta.run(row)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return Backend("emulated", Registers(tmp_path_factory.mktemp("ptx")))


SMALL = {name: case for name, case in directed().items() if case.rows * case.width <= 3000 and case.k <= 4096}


@pytest.mark.parametrize("name", list(SMALL)[::6])
def test_directed(emulated: Backend, name: str) -> None:
    emulated.run(SMALL[name])


def large() -> Iterator[tuple[str, Case]]:
    """Every kind of row in both orders, unaligned windows, and rows that need each way to count."""
    kinds = ("plateau", "high-bits", "one-bin", "equal", "descending", "any-bits", "nan", "near-one", "specials")
    for i, kind in enumerate(kinds):
        for dtype in ("bfloat16", "float32"):
            options: dict[str, Any] = {"dtype": dtype, "values": True, "largest": i % 3 != 2}
            yield f"{kind}-{dtype}", rows_of(kind, 1, 4096 + 4096 * (i % 2), 300 + i, **options)
            yield f"{kind}-{dtype}-index", rows_of(kind, 1, 4090, 1000, order="index", ties="highest", **options)
    for k in (1, 2047, 2048, 2049, 4095, 4096):
        yield f"k-{k}", rows_of("near-one", 1, 4096, k)
    starts = {"row_starts": ints(3), "lengths": ints(4000)}
    yield "window", rows_of("any-bits", 1, 4096, 500, **starts)
    yield "window-f32", rows_of("any-bits", 1, 4095, 500, dtype="float32", order="value", values=True, **starts)
    yield "groups", rows_of("any-bits", 1, 8000, 100, group=8, values=True, pin_newest=True, **starts)


LARGE = dict(large())


@pytest.mark.parametrize("name", LARGE)
def test_large(emulated: Backend, name: str) -> None:
    emulated.run(LARGE[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_against_the_bins_of_16_bits(emulated: Backend, dtype: str, kind: str) -> None:
    """One vector a thread, some threads with none; every thread has one; two rounds."""
    for width, every in ((1500, 4), (4096, 8), (4999, 8)):
        for case in list(near_cases(kind, dtype, width))[width % 3 :: every]:
            emulated.run(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", VALUE_KINDS)
def test_by_value(emulated: Backend, kind: str, dtype: str) -> None:
    largest = kind not in ("signs", "outlier")
    emulated.run(case_of(kind, dtype, 2100, 2048, largest=largest, ties="lowest" if largest else "highest"))


@pytest.mark.parametrize("count", COUNTS)
def test_by_value_of_every_count(emulated: Backend, count: int) -> None:
    emulated.run(case_of("normal", "float32", 2500, count, largest=count % 2 == 0, ties="highest"))
