"""The `radix_wide` kernel's own PTX, run by the interpreter in `ptx`, against the oracle; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import ptx
from tests.kernels.emulated_memory import Placed, place
from topkd.kernels import SelectRequest, TopKResult, select_topk, spare_bytes, validate_select
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels._cute_launch import SPARE, of_table, table_entry
from topkd.kernels._family import Job
from topkd.kernels.radix_wide import DTYPES, LIST_CAPACITY

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

SHARED = 100 * 1024


class Emulated:
    """`select_topk` by the interpreted kernel, on CPU tensors."""

    def __init__(self, folder: Path, arch: str = "sm_90a") -> None:
        self.folder = folder
        self.arch = arch
        self.kernels: dict[tuple[str, bool], ptx.Kernel] = {}

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def select_topk(self, input: torch.Tensor, k: int, **options: Any) -> TopKResult:
        request = validate_select(input, k, **options)
        job = _job(request)
        if request.rows:
            self._run(job)
        return job.result

    def merge_topk(self, values: torch.Tensor, indices: torch.Tensor, k: int, **options: Any) -> TopKResult:
        raise NotImplementedError("this family selects only")

    def _kernel(self, dtype: str, grouped: bool) -> ptx.Kernel:
        if (dtype, grouped) not in self.kernels:
            folder = self.folder / f"{dtype}-{grouped}"
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("radix_wide_kernel", "RadixWide", (dtype, grouped), self.arch, options)
            (text,) = folder.glob("*.ptx")
            self.kernels[dtype, grouped] = ptx.parse(text.read_text())
        return self.kernels[dtype, grouped]

    def _run(self, job: Job) -> None:
        self.run_jobs([job])

    def run_jobs(self, jobs: list[Job]) -> None:
        """Runs jobs of one plan key: several by a table of them, as `launches` makes it."""
        memory = ptx.GlobalMemory()
        placed = [Placed(memory, job) for job in jobs]
        arguments = placed[0].arguments
        if len(jobs) > 1:
            table = torch.tensor([table_entry(each.arguments) for each in placed])
            arguments = of_table(arguments, len(jobs), place(memory, table, False))
        self._launch(jobs[0].request, memory, arguments)
        for each in placed:
            each.read_back()

    def _launch(self, request: SelectRequest, memory: ptx.GlobalMemory, arguments: tuple[int, ...]) -> None:
        """Runs the kernel for jobs like `request`."""
        kernel = self._kernel(DTYPES[request.input.dtype], request.group > 1 and not request.pooled)
        *rest, rows = arguments
        cta = ptx.Cta(kernel, memory, rest, 1024, SHARED)
        for row in range(rows):
            cta.run(row)


def _job(request: SelectRequest) -> Job:
    indices, values = request.out_indices, request.out_values
    if indices is None:
        indices = torch.empty(request.output_shape, dtype=request.index_dtype)
    if values is None and request.values:
        values = torch.empty(request.output_shape, dtype=request.input.dtype)
    return Job(request, indices, values)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return Backend("emulated", Emulated(tmp_path_factory.mktemp("ptx")))


SMALL = {
    name: case
    for name, case in directed().items()
    if case.rows * case.width <= 3000 and not (case.order == "value" and case.k > LIST_CAPACITY)
}


@pytest.mark.parametrize("name", list(SMALL)[::6])
def test_directed(emulated: Backend, name: str) -> None:
    emulated.run(SMALL[name])


def large() -> Iterator[tuple[str, Case]]:
    """Rows past the list, at the list's own bounds, and every way that a row can end."""
    for width in (LIST_CAPACITY - 1, LIST_CAPACITY, LIST_CAPACITY + 1):
        for k in (LIST_CAPACITY - 1, LIST_CAPACITY, LIST_CAPACITY + 1):
            yield f"bounds-{width}-{k}", rows_of("near-one", 1, width, k, order="index", ties="highest", values=True)
    for kind in ("plateau", "high-bits", "one-bin", "equal", "descending", "any-bits", "nan"):
        options: dict[str, Any] = {"order": "index", "ties": "lowest", "dtype": "float32"}
        yield f"{kind}-f32", rows_of(kind, 1, 20000, 1000, **options)
    yield "direct", rows_of("near-one", 1, 20000, 12000, order="index", ties="highest", values=True)
    yield "direct-pinned", rows_of("few-finite", 1, 20000, 12000, order="index", pin_newest=True, drop_neg_inf=True)
    yield "direct-smallest", rows_of("specials", 1, 20000, 12000, order="index", largest=False, dtype="float16")
    yield "value", rows_of("any-bits", 1, 20000, 5000, order="value", values=True, dtype="float16")
    for group in (2, 8, 32):
        starts = {"row_starts": ints(3), "group": group, "order": "index"}
        yield f"group-{group}", rows_of("any-bits", 1, 40000, 100, values=True, **starts)
        yield f"group-{group}-f32", rows_of("any-bits", 1, 40000, 100, values=True, dtype="float32", **starts)


LARGE = dict(large())


@pytest.mark.parametrize("name", LARGE)
def test_large(emulated: Backend, name: str) -> None:
    emulated.run(LARGE[name])


def test_a_table_of_jobs_is_one_launch(tmp_path: Path) -> None:
    """Rows from tensors with strides of their own, lengths, offsets, tables and values: as each job by itself."""
    jobs, alone = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(2, 300 + seed, generator=generator)[:, :300]
        lengths = torch.tensor([300 - 7 * seed, 5 + seed], dtype=torch.int32)
        table = torch.randperm(40 + seed, generator=generator).to(torch.int32).view(1, -1)
        options: dict[str, Any] = {"lengths": lengths, "order": "index", "values": True, "page_table": table}
        options |= {"page_size": 8, "row_to_table": torch.zeros(2, dtype=torch.int32)}
        request = validate_select(scores, 9, **options)
        jobs.append(_job(request))
        alone.append(select_topk(scores, 9, kernel="torch", **options))
    Emulated(tmp_path).run_jobs(jobs)
    for job, one in zip(jobs, alone, strict=True):
        assert torch.equal(job.indices, one.indices)
        assert job.values is not None
        assert one.values is not None
        assert torch.equal(job.values, one.values)


@pytest.mark.parametrize("mark", [0, 1])
def test_marked_spare_memory_takes_all_cells(tmp_path: Path, mark: int) -> None:
    emulated = Emulated(tmp_path)
    scores = torch.randn(3, 500, dtype=torch.float32)
    indices, values = torch.full((3, 20), -7, dtype=torch.int32), torch.full((3, 20), -7.0)
    options: dict[str, Any] = {"order": "index", "ties": "lowest", "values": True}
    job = _job(validate_select(scores, 20, out_indices=indices, out_values=values, **options))
    memory = ptx.GlobalMemory()
    placed = Placed(memory, job)
    spare = torch.full((spare_bytes(20) // 8,), -9)
    spare[0] = mark
    arguments = list(placed.arguments)
    arguments[SPARE] = place(memory, spare, True)
    memory.readable[arguments[SPARE] - memory.BASE :][:8] = True
    emulated._launch(job.request, memory, tuple(arguments))
    placed.read_back()
    there = memory.get(arguments[SPARE], np.int64, len(spare))
    assert there[:2].tolist() == [mark, -9]
    if mark:
        assert bool((indices == -7).all())
        assert bool((values == -7.0).all())
        assert (there[2:] != -9).any()
    else:
        want = select_topk(scores, 20, **options)
        assert want.values is not None
        assert torch.equal(indices, want.indices)
        assert torch.equal(values, want.values)
        assert (there[2:] == -9).all()
