"""Cases of the oracle as checked requests of `topkd.kernels`, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.oracle import Case, check
from topkd.kernels import (
    SelectRequest,
    TopKResult,
    _torch_family,
    _torch_merge,
    _torch_select,
    _torch_write,
    validate_select,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTS = {"int32": torch.int32, "int64": torch.int64}
OPTIONS = (
    *("next_n", "max_length", "group", "pooled", "pin_newest", "drop_neg_inf", "expand", "largest", "order", "ties"),
    *("values", "page_size", "kernel"),
)
VECTORS = ("lengths", "row_starts", "row_offsets", "row_to_table", "table_starts", "page_table")
STEPS = (_torch_merge, _torch_family, _torch_select, _torch_write)


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array.copy().view(f"int{array.itemsize * 8}"))


def request(case: Case, **changes: Any) -> SelectRequest:
    """The case as a request; `changes` are options on top."""
    storage = torch.cat((tensor(case.storage), tensor(case.storage[:0]).new_zeros(1)))  # never empty
    options: dict[str, Any] = {name: getattr(case, name) for name in OPTIONS}
    for name in VECTORS:
        array = getattr(case, name)
        options[name] = None if array is None else tensor(array)
    options["index_dtype"] = INTS[case.index_dtype]
    view = storage.view(DTYPES[case.dtype]).as_strided(
        (case.rows, case.width), (case.stride, case.col_stride), case.storage_offset
    )
    return validate_select(view, case.k, **options | changes)


def judge(case: Case, result: TopKResult) -> None:
    """Hold a result against the oracle."""
    values = None
    if result.values is not None:
        bits = result.values.view(torch.int32 if case.dtype == "float32" else torch.int16).numpy()
        values = bits.view(f"uint{bits.itemsize * 8}")
    check(case, result.indices.numpy(), values)


@contextmanager
def cells(count: int) -> Iterator[None]:
    """Let one step of the torch family hold `count` cells only, so that small rows are cut in many ways."""
    before = _torch_write.CELLS
    try:
        for module in STEPS:
            module.CELLS = count  # type: ignore[attr-defined]
        yield
    finally:
        for module in STEPS:
            module.CELLS = before  # type: ignore[attr-defined]
