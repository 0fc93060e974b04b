"""`Commit` without a GPU: its device code compiles, and which unit it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkd.kernels import Commit, _cute_compile
from topkd.kernels import commit as host

needs_compiler = pytest.mark.skipif(not _cute_compile.installed(), reason="needs nvidia-cutlass-dsl")


@needs_compiler
def test_all_units_compile_for_the_oldest_and_the_newest(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_CACHE_DIR", str(tmp_path))
    for arch in ("sm_80", "sm_90a"):
        Commit().precompile(arch)


@pytest.mark.parametrize(
    ("dtype", "columns", "stride", "skew", "unit", "units"),
    [
        (torch.int64, 5, 5, 0, 8, 15),
        (torch.int32, 6, 6, 0, 8, 9),
        (torch.int32, 5, 5, 0, 4, 15),
        (torch.int32, 6, 7, 0, 4, 18),
        (torch.int32, 6, 6, 1, 4, 18),
        (torch.int16, 8, 8, 0, 8, 6),
        (torch.int16, 6, 8, 0, 4, 9),
        (torch.int16, 5, 8, 0, 2, 15),
        (torch.int16, 8, 8, 1, 2, 24),
    ],
)
def test_the_largest_unit_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, stride: int, skew: int, unit: int, units: int
) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(host, "capability", lambda index: (9, 0))
    monkeypatch.setattr(host, "device_index", lambda device: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    properties = type("Properties", (), {"multi_processor_count": 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    commit = Commit()
    for each in host.UNITS:
        commit._compiled["sm_90a", each] = lambda *arguments, each=each: launched.append((each, *arguments))
    source = torch.zeros(3, columns, dtype=dtype)
    target = torch.zeros(64, dtype=dtype).as_strided((3, columns), (stride, 1), skew)
    commit(source, target, 4096, 9)
    size = dtype.itemsize
    row = columns * size // unit
    addresses = source.data_ptr(), target.data_ptr()
    assert launched == [(unit, *addresses, stride * size, row, units, 4096, 9, 1, 77)]
    commit(source[:0], target[:0], 4096, 9)
    assert len(launched) == 1
