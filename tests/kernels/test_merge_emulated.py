"""The merge kernel's own PTX, run by the interpreter in `ptx`, against the oracle; no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import MergeCase
from tests.conformance.backends import Backend
from tests.conformance.test_merge import candidates, named
from tests.kernels import ptx
from tests.kernels.emulated_memory import bytes_of, place
from tests.kernels.test_cluster_emulated import Cta as ClusterCta
from topkd.kernels import TopKResult, validate_merge
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels.merge import _DTYPES, MAX_K, merge_arguments

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

SHARED = 100 * 1024
POINTERS = (0, 2, 4, 6)


class Cta(ptx.Cta):
    """A CTA that knows the atomic operation which returns what was there."""

    _op_atom = ClusterCta._op_atom


class Emulated:
    """`merge_topk` by the interpreted kernel, on CPU tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: dict[tuple[str, bool], ptx.Kernel] = {}

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def select_topk(self, input: torch.Tensor, k: int, **options: Any) -> TopKResult:
        raise NotImplementedError("this kernel merges only")

    def merge_topk(self, values: torch.Tensor, indices: torch.Tensor, k: int, **options: Any) -> TopKResult:
        request = validate_merge(values, indices, k, **options)
        out = request.out_indices, request.out_values
        written = [
            torch.empty(request.output_shape, dtype=like.dtype) if given is None else given
            for given, like in zip(out, (indices, values), strict=True)
        ]
        if request.rows:
            self._run(list(merge_arguments(request, written[0], written[1])), [values, indices], written)
        return TopKResult(written[0], written[1])

    def _run(self, arguments: list[int], given: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        kernel = self._kernel(_DTYPES[given[0].dtype], given[1].dtype == torch.int64)
        memory = ptx.GlobalMemory()
        tensors = [(one, False) for one in given] + [(one, True) for one in written]
        places = [place(memory, one, output) if one.numel() else 0 for one, output in tensors]
        for at, address in zip(POINTERS, places, strict=True):
            arguments[at] = address
        *rest, rows = arguments
        cta = Cta(kernel, memory, rest, 1024, SHARED)
        for row in range(rows):
            cta.run(row)
        for tensor, address in zip(written, places[2:], strict=True):
            whole = bytes_of(tensor)
            start = address - (tensor.data_ptr() - whole.data_ptr())
            whole.numpy()[:] = memory.get(start, np.uint8, whole.numel())

    def _kernel(self, dtype: str, wide: bool) -> ptx.Kernel:
        if (dtype, wide) not in self.kernels:
            folder = self.folder / f"{dtype}-{wide}"
            folder.mkdir(parents=True)
            compile_kernel("merge_kernel", "Merge", (dtype, wide), "sm_90a", f"--keep-ptx --dump-dir {folder}")
            (text,) = folder.glob("*.ptx")
            self.kernels[dtype, wide] = ptx.parse(text.read_text())
        return self.kernels[dtype, wide]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return Backend("emulated", Emulated(tmp_path_factory.mktemp("ptx")))


NAMED = named()


@pytest.mark.parametrize("name", list(NAMED)[::2])
def test_named(emulated: Backend, name: str) -> None:
    emulated.merge(NAMED[name])


def large() -> dict[str, MergeCase]:
    """Rows past the list, and at its bounds; crowded ones that need the digits of indices."""
    made = {}
    for count, k in ((MAX_K, MAX_K), (MAX_K + 1, MAX_K - 1), (9000, MAX_K), (12289, 30)):
        made[f"bounds-{count}-{k}"] = candidates("levels", 1, count, k, order="value", ties="lowest")
    for kind in ("equal", "nan", "plateau", "any-bits"):
        options: dict[str, Any] = {"dtype": "float32", "index_dtype": "int64", "order": "index", "ties": "highest"}
        made[f"{kind}-int64"] = candidates(kind, 1, 9000, 700, **options)
        made[f"{kind}-smallest"] = candidates(kind, 1, 9000, 700, order="value", ties="lowest", largest=False)
    twice = np.arange(9000, dtype=np.int32)[None] // 3000
    made["thrice"] = MergeCase(
        values=np.zeros((1, 9000), np.uint32), indices=twice, dtype="float32", k=3500, ties="lowest"
    )
    return made


LARGE = large()


@pytest.mark.parametrize("name", LARGE)
def test_large(emulated: Backend, name: str) -> None:
    emulated.merge(LARGE[name])
