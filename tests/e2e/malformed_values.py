"""The rest of the wrong requests: numbers, options that do not go together, batches, ids, bytes that are no message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.e2e.malformed import (
    EXHAUSTED,
    INVALID,
    LEAST,
    MOST,
    NOT_FOUND,
    ROWS,
    BadCase,
    Ids,
    first,
    first_merge,
    merging,
    paged,
    plain,
)
from tests.e2e.raw import batch, inline, placed
from topkd.v1 import selection_pb2, tensor_pb2

Change = Callable[[selection_pb2.Selection, Ids], None]
LIMIT = (INVALID, EXHAUSTED)

NUMBERS: dict[str, tuple[int, ...]] = {
    "k": (0, -1, (1 << 20) + 1, 1 << 31, 1 << 32, MOST, LEAST),
    "next_n": (0, -1, 3, MOST, LEAST),
    "max_length": (-1, 1 << 31, MOST, LEAST),
    "group": (0, -1, 3, 129, 256, MOST, LEAST),
    "page_size": (0, -1, 3, 1 << 31, 1 << 62, MOST, LEAST),
    "order": (4, 99, -1),
    "ties": (4, 99, -1),
    "index_dtype": (tensor_pb2.D_TYPE_FLOAT32, tensor_pb2.D_TYPE_BFLOAT16, 99, -1),
}


def _fields(*clear: str, **values: Any) -> Change:
    def change(selection: selection_pb2.Selection, _: Ids) -> None:
        for name in clear:
            selection.ClearField(name)
        for name, value in values.items():
            setattr(selection, name, value)

    return change


def _tensor(name: str, offset: int, shape: tuple[int, ...], dtype: str = "INT32", **values: Any) -> Change:
    def change(selection: selection_pb2.Selection, ids: Ids) -> None:
        getattr(selection, name).CopyFrom(placed(ids.region, offset, shape, dtype))
        _fields(**values)(selection, ids)

    return change


def _many_rows(selection: selection_pb2.Selection, ids: Ids) -> None:
    """2^24 + 1 rows that are all one: within the region, beyond the server's limit."""
    selection.CopyFrom(selection_pb2.Selection(input=placed(ids.region, 0, ((1 << 24) + 1, 4)), k=1))
    selection.input.strides.extend([0, 1])


def _large_reply(selection: selection_pb2.Selection, ids: Ids) -> None:
    """Results of 1 GiB that no output was named for."""
    selection.CopyFrom(selection_pb2.Selection(input=placed(ids.region, 0, (1 << 24, 16)), k=16))
    selection.input.strides.extend([0, 1])


def _huge_empty(selection: selection_pb2.Selection, ids: Ids) -> None:
    """No elements, but more columns than a row can have."""
    selection.CopyFrom(selection_pb2.Selection(input=placed(ids.region, 0, (0, MOST)), k=1))


def _same_outputs(selection: selection_pb2.Selection, ids: Ids) -> None:
    selection.out_values.region.offset = selection.out_indices.region.offset + 4


def _output_over_table(selection: selection_pb2.Selection, ids: Ids) -> None:
    selection.out_indices.region.offset = selection.page_table.region.offset


def _few_tables(selection: selection_pb2.Selection, ids: Ids) -> None:
    selection.ClearField("row_to_table")
    selection.page_table.shape[0] = ROWS - 1


OPTIONS: dict[str, tuple[Callable[[Ids], selection_pb2.Selection], Change, str | tuple[str, ...]]] = {
    "kernel-unknown": (plain, _fields(kernel="nonsense"), "kernel"),
    "kernel-path": (plain, _fields(kernel="../../etc/passwd"), "kernel"),
    "kernel-long": (plain, _fields(kernel="x" * 5000), "kernel"),
    "kernel-of-another-device": (plain, _fields(kernel="cluster"), "kernel"),
    "input-absent": (plain, _fields("input"), "input"),
    "smallest-of-groups": (plain, _fields("out_indices", "out_values", largest=False, group=8), ("largest", "group")),
    "smallest-pinned": (plain, _fields(largest=False, pin_newest=True), ("largest", "pin_newest")),
    "smallest-dropped": (plain, _fields(largest=False, drop_neg_inf=True), ("largest", "drop_neg_inf")),
    "smallest-expanded": (
        plain,
        _fields("out_values", largest=False, expand=True, values=False),
        ("largest", "expand"),
    ),
    "expanded-values": (plain, _fields("out_indices", "out_values", group=2, expand=True), ("expand", "values")),
    "pooled-members": (plain, _fields(pooled=True), ("pooled", "group")),
    "pooled-windows": (plain, _fields(pooled=True, group=8), ("pooled", "row_starts")),
    "values-not-asked": (plain, _fields(values=False), ("out_values", "values")),
    "page-size-alone": (plain, _fields(page_size=16), ("page_size", "page_table")),
    "table-rows-alone": (paged, _fields("page_table", page_size=1), ("row_to_table", "page_table", "table_starts")),
    "table-starts-alone": (paged, _fields("page_table", "row_to_table", page_size=1), ("table_starts", "page_table")),
    "table-and-offsets": (paged, _tensor("row_offsets", 33280, (ROWS,)), ("page_table", "row_offsets")),
    "tables-too-few": (paged, _few_tables, "page_table"),
    "wide-offsets": (plain, _tensor("row_offsets", 40960, (ROWS,), "INT64"), ("row_offsets", "index_dtype")),
    "wide-indices-narrow-output": (plain, _fields(index_dtype=tensor_pb2.D_TYPE_INT64), "out_indices"),
    "outputs-overlap": (plain, _same_outputs, ("out_indices", "out_values")),
    "output-over-table": (paged, _output_over_table, "out_indices"),
    "lengths-of-drafts": (plain, _fields(next_n=2), "lengths"),
    "rows-beyond-limit": (plain, _many_rows, "input"),
    "columns-beyond-limit": (plain, _huge_empty, "input"),
    "reply-too-large": (plain, _large_reply, ("out_indices", "input", "")),
}


def _second(base: Callable[[Ids], selection_pb2.Selection], change: Change) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.SelectTopKRequest:
        selection = base(ids)
        change(selection, ids)
        return batch(first(ids), selection)

    return build


def _paths(names: str | tuple[str, ...]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names
    return tuple(f"items[1].selection.{name}" for name in names)


def value_cases() -> Iterator[BadCase]:
    """Yields bad numbers and options."""
    for name, numbers in NUMBERS.items():
        for number in numbers:
            base = paged if name == "page_size" else plain
            build = _second(base, _fields(**{name: number}))
            yield BadCase(f"{name}-{number}", "SelectTopK", build, field=_paths(name))
    for name, (right, change, fields) in OPTIONS.items():
        codes = LIMIT if name in ("rows-beyond-limit", "reply-too-large") else (INVALID,)
        yield BadCase(name, "SelectTopK", _second(right, change), codes, _paths(fields))
    for name in ("k", "order", "ties"):
        for number in NUMBERS[name]:
            yield BadCase(f"merge-{name}-{number}", "MergeTopK", _merge_with(name, number), field=f"items[1].{name}")


def _merge_with(name: str, number: int) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.MergeTopKRequest:
        merge = merging(ids)
        setattr(merge, name, number)
        return selection_pb2.MergeTopKRequest(items=[first_merge(ids), merge])

    return build


def _plan_call(name: str | int) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.SelectTopKRequest:
        call = selection_pb2.PlanCall(plan_id=name if isinstance(name, int) else getattr(ids, name))
        items = [selection_pb2.BatchItem(selection=first(ids)), selection_pb2.BatchItem(plan=call)]
        return selection_pb2.SelectTopKRequest(items=items)

    return build


def _item_without_kind(ids: Ids) -> selection_pb2.SelectTopKRequest:
    request = batch(first(ids))
    request.items.add()
    return request


def _too_many(ids: Ids) -> selection_pb2.SelectTopKRequest:
    one = selection_pb2.Selection(input=inline_row(), k=1)
    return batch(*[one] * 1025)


def inline_row() -> tensor_pb2.Tensor:
    """Returns four scores inside the message."""
    return inline(np.zeros((1, 4), np.float32))


def _inline_plan(ids: Ids) -> selection_pb2.CreatePlanRequest:
    return selection_pb2.CreatePlanRequest(selection=selection_pb2.Selection(input=inline_row(), k=1))


def _cuda(**values: Any) -> Callable[[Ids], Any]:
    memory: dict[str, Any] = {"handle": bytes(64), "size": 1 << 21, "device_uuid": "GPU-0"} | values
    return lambda _: selection_pb2.RegisterRegionRequest(cuda_ipc=selection_pb2.CudaIpcMemory(**memory))


def id_cases() -> Iterator[BadCase]:
    """Yields batches as a whole, plans and regions by wrong ids, memory that this server does not take."""
    yield BadCase("batch-empty", "SelectTopK", lambda _: selection_pb2.SelectTopKRequest(), field="items")
    yield BadCase("batch-too-large", "SelectTopK", _too_many, LIMIT, "items")
    yield BadCase("batch-item-empty", "SelectTopK", _item_without_kind, field="items[1]")
    yield BadCase("merge-batch-empty", "MergeTopK", lambda _: selection_pb2.MergeTopKRequest(), field="items")
    yield BadCase("plan-nothing", "CreatePlan", lambda _: selection_pb2.CreatePlanRequest(), field="selection")
    yield BadCase("plan-inline", "CreatePlan", _inline_plan, field="selection")
    for name in ("foreign_plan", "released_plan", 0, 0xDEADBEEF_00000001):
        yield BadCase(f"call-plan-{name}", "SelectTopK", _plan_call(name), (NOT_FOUND,), "items[1].plan.plan_id")
        yield BadCase(f"release-plan-{name}", "ReleasePlan", _release("plan", name), (NOT_FOUND,), "plan_id")
    for name in ("foreign_region", "released_region", 0, 0xDEADBEEF_00000001):
        yield BadCase(f"release-region-{name}", "ReleaseRegion", _release("region", name), (NOT_FOUND,), "region_id")
    nothing = selection_pb2.RegisterRegionRequest
    yield BadCase("register-nothing", "RegisterRegion", lambda _: nothing(), field="memory")
    cuda = (INVALID, "FAILED_PRECONDITION")
    changes: dict[str, dict[str, Any]] = {
        "handle": {},
        "handle-short": {"handle": b"x"},
        "handle-long": {"handle": bytes(4096)},
        "size-zero": {"size": 0},
        "size-most": {"size": (1 << 64) - 1},
        "offset-most": {"offset": (1 << 64) - 1},
        "device": {"device_uuid": "GPU-\x00" + "x" * 1000},
    }
    for name, values in changes.items():
        yield BadCase(f"register-cuda-{name}", "RegisterRegion", _cuda(**values), cuda, "cuda_ipc")


def _release(kind: str, name: str | int) -> Callable[[Ids], Any]:
    message = selection_pb2.ReleasePlanRequest if kind == "plan" else selection_pb2.ReleaseRegionRequest
    return lambda ids: message(**{f"{kind}_id": name if isinstance(name, int) else getattr(ids, name)})


@dataclass(frozen=True)
class Bytes:
    """Bytes where a message should be."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages have it
        """Returns them."""
        return self.data


GARBAGE: dict[str, bytes] = {
    "endless-number": b"\xff" * 16,
    "longer-than-it-is": b"\x0a\xff\xff\xff\xff\x0f",
    "cut": b"\x0a\x05ab",
    "field-zero": b"\x00\x01",
    "group-end": b"\x0c",
    "cut-number": b"\x09\x01",
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


def _constant(data: bytes) -> Callable[[Ids], Bytes]:
    return lambda _: Bytes(data)


def garbage_cases() -> Iterator[BadCase]:
    """Yields bytes that are no message, to every method."""
    methods = ("SelectTopK", "MergeTopK", "CreatePlan", "ReleasePlan", "RegisterRegion", "ReleaseRegion")
    for method in methods:
        for name, data in GARBAGE.items():
            yield BadCase(f"garbage-{name}-{method}", method, _constant(data))
    text = selection_pb2.Selection(kernel="abcd").SerializeToString().replace(b"abcd", b"\xff\xfe\xfd\xfc")
    wrapped = bytes([0x0A, len(text) + 2, 0x0A, len(text)]) + text
    yield BadCase("garbage-utf8", "SelectTopK", lambda _: Bytes(wrapped))
