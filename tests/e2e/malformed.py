"""Requests that are wrong, made systematically: every tensor of every message gets every fault.

A case changes one thing in a request that is right otherwise. In batches it is the second entry, behind one that is
right: nothing of either may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.e2e.raw import placed
from topkd.v1 import selection_pb2, tensor_pb2

REGION_BYTES = 1 << 20
ROWS, WIDTH, K = 4, 1024, 16
OUTPUTS_AT = 1 << 16
"""Outputs lie from here to the end of the region; nothing may be written there."""

MOST, LEAST = (1 << 63) - 1, -(1 << 63)
INVALID, NOT_FOUND, EXHAUSTED = "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Ids:
    """What a session has, and what another has."""

    region: int
    foreign_region: int
    plan: int
    foreign_plan: int
    released_plan: int
    released_region: int


@dataclass(frozen=True)
class BadCase:
    """A request, and how it must be refused.

    Attributes:
        name: unique.
        method: of SelectionService.
        build: makes the request.
        codes: that may answer it.
        field: how the path of the violation begins, or several such beginnings; empty: none is asked for.
    """

    name: str
    method: str
    build: Callable[[Ids], Any]
    codes: tuple[str, ...] = (INVALID,)
    field: str | tuple[str, ...] = ""


Fault = Callable[[tensor_pb2.Tensor, Ids], None]


def _set(**fields: Any) -> Fault:
    def fault(tensor: tensor_pb2.Tensor, _: Ids) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                del getattr(tensor, name)[:]
                getattr(tensor, name).extend(value)
            else:
                setattr(tensor, name, value)

    return fault


def _shape(change: Callable[[list[int]], list[int]]) -> Fault:
    return lambda tensor, ids: _set(shape=change(list(tensor.shape)))(tensor, ids)


def _strides(change: Callable[[int], list[int]]) -> Fault:
    return lambda tensor, ids: _set(strides=change(len(tensor.shape)))(tensor, ids)


def _offset(value: int) -> Fault:
    def fault(tensor: tensor_pb2.Tensor, _: Ids) -> None:
        tensor.region.offset = value

    return fault


def _region(name: str | int) -> Fault:
    def fault(tensor: tensor_pb2.Tensor, ids: Ids) -> None:
        tensor.region.region_id = name if isinstance(name, int) else getattr(ids, name)

    return fault


def _no_storage(tensor: tensor_pb2.Tensor, _: Ids) -> None:
    tensor.ClearField("region")


def _wrong_dtype(tensor: tensor_pb2.Tensor, _: Ids) -> None:
    scores = tensor.dtype == tensor_pb2.D_TYPE_FLOAT32
    tensor.dtype = tensor_pb2.D_TYPE_INT32 if scores else tensor_pb2.D_TYPE_FLOAT32


def _inline(change: int, strides: bool = False) -> Fault:
    def fault(tensor: tensor_pb2.Tensor, _: Ids) -> None:
        elements = 1
        for size in tensor.shape:
            elements *= size
        tensor.inline_data = bytes(max(0, elements * 4 + change))
        if strides:
            tensor.strides.extend([tensor.shape[-1], 1][-len(tensor.shape) :])

    return fault


TENSOR_FAULTS: dict[str, tuple[Fault, str]] = {
    "dtype-unspecified": (_set(dtype=0), INVALID),
    "dtype-unknown": (_set(dtype=99), INVALID),
    "dtype-negative": (_set(dtype=-1), INVALID),
    "dtype-wrong": (_wrong_dtype, INVALID),
    "shape-none": (_shape(lambda _: []), INVALID),
    "shape-3d": (_shape(lambda shape: [1, *([1] * (2 - len(shape))), *shape]), INVALID),
    "shape-negative-first": (_shape(lambda shape: [-1, *shape[1:]]), INVALID),
    "shape-negative-last": (_shape(lambda shape: [*shape[:-1], -4]), INVALID),
    "shape-least": (_shape(lambda shape: [LEAST, *shape[1:]]), INVALID),
    "shape-most-first": (_shape(lambda shape: [MOST, *shape[1:]]), INVALID),
    "shape-most-last": (_shape(lambda shape: [*shape[:-1], MOST]), INVALID),
    "shape-wraps-to-small": (_shape(lambda shape: [(1 << 62) + 1] * len(shape)), INVALID),
    "shape-beyond-region": (_shape(lambda shape: [REGION_BYTES, *shape[1:]]), INVALID),
    "strides-negative-last": (_strides(lambda sizes: [WIDTH, -1][-sizes:]), INVALID),
    "strides-most": (_strides(lambda sizes: [MOST] * sizes), INVALID),
    "strides-least": (_strides(lambda sizes: [LEAST] * sizes), INVALID),
    "strides-last-2": (_strides(lambda sizes: [2 * WIDTH, 2][-sizes:]), INVALID),
    "strides-one-too-many": (_strides(lambda sizes: [WIDTH, WIDTH, 1][-sizes - 1 :]), INVALID),
    "offset-misaligned": (_offset(OUTPUTS_AT + 1), INVALID),
    "offset-at-end": (_offset(REGION_BYTES), INVALID),
    "offset-one-before-end": (_offset(REGION_BYTES - 4), INVALID),
    "offset-wraps": (_offset((1 << 64) - 4), INVALID),
    "offset-half": (_offset(1 << 63), INVALID),
    "region-foreign": (_region("foreign_region"), NOT_FOUND),
    "region-released": (_region("released_region"), NOT_FOUND),
    "region-zero": (_region(0), NOT_FOUND),
    "region-unknown": (_region(0xDEADBEEF_00000001), NOT_FOUND),
    "storage-none": (_no_storage, INVALID),
    "inline-short": (_inline(-1), INVALID),
    "inline-long": (_inline(4), INVALID),
    "inline-strides": (_inline(0, strides=True), INVALID),
}
MATRIX_FAULTS: dict[str, tuple[Fault, str]] = {
    "shape-1d": (_shape(lambda shape: shape[:1]), INVALID),
    "strides-negative-row": (_strides(lambda _: [-WIDTH, 1]), INVALID),
    "strides-row-wraps": (_strides(lambda _: [1 << 62, 1]), INVALID),
    "strides-row-beyond-region": (_strides(lambda _: [REGION_BYTES, 1]), INVALID),
    "strides-one-too-few": (_strides(lambda _: [1]), INVALID),
}
VECTOR_FAULTS: dict[str, tuple[Fault, str]] = {
    "shape-2d": (_shape(lambda shape: [*shape, 1]), INVALID),
    "one-too-many": (_shape(lambda shape: [shape[0] + 1]), INVALID),
    "one-too-few": (_shape(lambda shape: [shape[0] - 1]), INVALID),
}
OUTPUT_FAULTS: dict[str, tuple[Fault, str]] = {
    "inline": (_inline(0), INVALID),
    "one-row-less": (_shape(lambda shape: [shape[0] - 1, shape[1]]), INVALID),
    "one-column-more": (_shape(lambda shape: [shape[0], shape[1] + 1]), INVALID),
    "rows-overlap": (_strides(lambda _: [K - 1, 1]), INVALID),
    "rows-are-one": (_strides(lambda _: [0, 1]), INVALID),
    "overlaps-input": (_offset(0), INVALID),
    "overlaps-the-first-entry's": (_offset(OUTPUTS_AT + 4), INVALID),
}


def plain(ids: Ids) -> selection_pb2.Selection:
    """Returns a selection that is right, with lengths, starts, offsets and outputs."""
    region = ids.region
    return selection_pb2.Selection(
        input=placed(region, 0, (ROWS, WIDTH)),
        k=K,
        lengths=placed(region, 32768, (ROWS,), "INT32"),
        row_starts=placed(region, 33024, (ROWS,), "INT32"),
        row_offsets=placed(region, 33280, (ROWS,), "INT32"),
        values=True,
        out_indices=placed(region, OUTPUTS_AT + 4096, (ROWS, K), "INT32"),
        out_values=placed(region, OUTPUTS_AT + 8192, (ROWS, K)),
    )


def paged(ids: Ids) -> selection_pb2.Selection:
    """Returns a selection that is right, with a page table."""
    selection, region = plain(ids), ids.region
    selection.ClearField("row_offsets")
    selection.page_table.CopyFrom(placed(region, 36864, (ROWS, 64), "INT32"))
    selection.page_size = 16
    selection.row_to_table.CopyFrom(placed(region, 33536, (ROWS,), "INT32"))
    selection.table_starts.CopyFrom(placed(region, 33792, (ROWS,), "INT32"))
    return selection


def first(ids: Ids) -> selection_pb2.Selection:
    """Returns the entry before the wrong one: right, and with an output of its own."""
    output = placed(ids.region, OUTPUTS_AT, (ROWS, K), "INT32")
    return selection_pb2.Selection(input=placed(ids.region, 0, (ROWS, WIDTH)), k=K, out_indices=output)


def merging(ids: Ids) -> selection_pb2.Merge:
    """Returns a merge that is right."""
    return selection_pb2.Merge(
        values=placed(ids.region, 0, (ROWS, 64)),
        indices=placed(ids.region, 16384, (ROWS, 64), "INT32"),
        k=K,
        out_indices=placed(ids.region, OUTPUTS_AT + 4096, (ROWS, K), "INT32"),
        out_values=placed(ids.region, OUTPUTS_AT + 8192, (ROWS, K)),
    )


def first_merge(ids: Ids) -> selection_pb2.Merge:
    """Returns the merge before the wrong one."""
    merge = merging(ids)
    merge.out_indices.region.offset = OUTPUTS_AT
    merge.out_values.region.offset = OUTPUTS_AT + 1024
    return merge


def _faults(tensor: str) -> dict[str, tuple[Fault, str]]:
    output = tensor.startswith("out_")
    matrix = output or tensor in ("input", "page_table", "values", "indices")
    return TENSOR_FAULTS | (MATRIX_FAULTS if matrix else VECTOR_FAULTS) | (OUTPUT_FAULTS if output else {})


def tensor_cases() -> Iterator[BadCase]:
    """Yields every fault of every tensor: in the second entry of a batch, in a plan, in the second merge of a batch."""
    plain_tensors = ("input", "lengths", "row_starts", "row_offsets", "out_indices", "out_values")
    tables = ("page_table", "row_to_table", "table_starts")
    for base, tensors in ((plain, plain_tensors), (paged, tables)):
        for tensor in tensors:
            for name, (fault, code) in _faults(tensor).items():
                path = f"selection.{tensor}"
                build = _batch(base, tensor, fault)
                yield BadCase(f"{tensor}-{name}", "SelectTopK", build, (code,), f"items[1].{path}")
                if "first-entry" not in name:
                    yield BadCase(f"plan-{tensor}-{name}", "CreatePlan", _plan(base, tensor, fault), (code,), path)
    for tensor in ("values", "indices", "out_indices", "out_values"):
        for name, (fault, code) in _faults(tensor).items():
            yield BadCase(f"merge-{tensor}-{name}", "MergeTopK", _merge(tensor, fault), (code,), f"items[1].{tensor}")


def _batch(base: Callable[[Ids], selection_pb2.Selection], tensor: str, fault: Fault) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.SelectTopKRequest:
        selection = base(ids)
        fault(getattr(selection, tensor), ids)
        items = [selection_pb2.BatchItem(selection=one) for one in (first(ids), selection)]
        return selection_pb2.SelectTopKRequest(items=items)

    return build


def _plan(base: Callable[[Ids], selection_pb2.Selection], tensor: str, fault: Fault) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.CreatePlanRequest:
        selection = base(ids)
        fault(getattr(selection, tensor), ids)
        return selection_pb2.CreatePlanRequest(selection=selection)

    return build


def _merge(tensor: str, fault: Fault) -> Callable[[Ids], Any]:
    def build(ids: Ids) -> selection_pb2.MergeTopKRequest:
        merge = merging(ids)
        fault(getattr(merge, tensor), ids)
        return selection_pb2.MergeTopKRequest(items=[first_merge(ids), merge])

    return build
