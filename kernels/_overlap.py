"""Which tensors of a batch overlap in memory.

A matrix with last stride 1 is a set of equal byte intervals in arithmetic progression. Bounding boxes decide most
pairs; where they meet, the question is whether two progressions of intervals meet, answered exactly in time
logarithmic in the strides by counting lattice points (the floor sum of R. L. Graham, D. E. Knuth, O. Patashnik,
*Concrete Mathematics*, 1994, section 3.5), so that column slices of one buffer do not count as overlapping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ._errors import ArgumentValueError, describe
from ._request import MergeRequest, SelectRequest

_INPUTS = {
    SelectRequest: ("input", "lengths", "row_starts", "row_offsets", "page_table", "row_to_table", "table_starts"),
    MergeRequest: ("values", "indices"),
}
_OUTPUTS = ("out_indices", "out_values")


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of one tensor: `rows` intervals of `width` bytes, `stride` bytes apart, the first at `start`."""

    start: int
    rows: int
    stride: int
    width: int

    @property
    def end(self) -> int:
        """First byte past the last interval."""
        return self.start + (self.rows - 1) * self.stride + self.width

    @classmethod
    def of(cls, tensor: Tensor) -> "Span | None":
        """Return the span of a matrix with last stride 1 or of a contiguous vector; None where it has no bytes."""
        if tensor.numel() == 0:
            return None
        size, last = tensor.element_size(), tensor.shape[-1]
        if tensor.dim() == 1 or tensor.shape[0] == 1:
            return cls(tensor.data_ptr(), 1, 0, last * size)
        stride = tensor.stride(0)
        if stride <= last:  # rows that touch or overlap make one interval
            return cls(tensor.data_ptr(), 1, 0, ((tensor.shape[0] - 1) * stride + last) * size)
        return cls(tensor.data_ptr(), tensor.shape[0], stride * size, last * size)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of (a * i + b) // m over i of 0 .. n-1, for n >= 0, m >= 1."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        n, b = divmod(top, m)
        m, a = a, m
    return total


def _touches(rows: int, stride: int, low: int, high: int) -> bool:
    """Say whether i * stride lies in low .. high for some i of 0 .. rows-1."""
    if rows == 1:
        return low <= 0 <= high
    first = max(-(-low // stride), 0)
    return first < rows and first * stride <= high


def overlap(a: Span, b: Span) -> bool:
    """Say exactly whether two spans share a byte.

    Row i of `a` meets row j of `b` where j * b.stride lies in [low + i * a.stride, high + i * a.stride].
    """
    if a.end <= b.start or b.end <= a.start:
        return False
    low, high = a.start - b.start - b.width + 1, a.start - b.start + a.width - 1
    if b.rows == 1:
        return _touches(a.rows, a.stride, -high, -low)
    if a.rows == 1:
        return _touches(b.rows, b.stride, low, high)
    last = (b.rows - 1) * b.stride
    if _touches(a.rows, a.stride, -high, -low) or _touches(a.rows, a.stride, last - high, last - low):
        return True  # the first or the last row of b
    # The rows of a that lie between b's first and last row: there j needs no bounds.
    first = max(-low // a.stride + 1, 0)  # low + i * stride >= 1
    stop = min((last - 1 - high) // a.stride + 1, a.rows)  # high + i * stride <= last - 1
    if first >= stop:
        return False
    n, low, high = stop - first, low + first * a.stride, high + first * a.stride
    return _floor_sum(n, b.stride, a.stride, high) > _floor_sum(n, b.stride, a.stride, low - 1)


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor of a batch."""

    span: Span
    name: str
    selection: int
    tensor: Tensor
    written: bool


def _items(requests: Sequence[SelectRequest] | Sequence[MergeRequest]) -> Iterator[_Item]:
    """List the tensors of a batch, an input that several selections share only once."""
    seen = set()
    for place, request in enumerate(requests):
        for name in (*_INPUTS[type(request)], *_OUTPUTS):
            tensor = getattr(request, name)
            if tensor is None or (span := Span.of(tensor)) is None:
                continue
            written = name in _OUTPUTS
            if written or span not in seen:
                yield _Item(span, name, place, tensor, written)
            if not written:
                seen.add(span)


def _boxes_apart(requests: Sequence[SelectRequest] | Sequence[MergeRequest]) -> bool:
    """Say whether the bounding box of no given output meets that of another tensor: then none of them overlap.

    True of nearly every call, and several times as fast as the whole check.
    """
    outputs = [output for one in requests for output in (one.out_indices, one.out_values) if output is not None]
    if not outputs:
        return True
    inputs = [getattr(one, name) for one in requests for name in _INPUTS[type(one)]]
    boxes = [(*_box(output), True) for output in outputs]
    boxes += [(*_box(tensor), False) for tensor in inputs if tensor is not None]
    boxes.sort()
    read = written = 0  # ends of the last boxes so far
    for start, end, is_output in boxes:
        if start == end:
            continue
        if start < written or (is_output and start < read):
            return False
        if is_output:
            written = max(written, end)
        else:
            read = max(read, end)
    return True


def _box(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a matrix with last stride 1 or of a vector, and the one past its last; equal: none."""
    start, shape = tensor.data_ptr(), tensor.shape
    last = shape[-1]
    if len(shape) > 1:
        if not shape[0]:
            return start, start
        last = last and (shape[0] - 1) * tensor.stride(0) + last
    return start, start + last * tensor.element_size()


def check_batch_overlap(requests: Sequence[SelectRequest] | Sequence[MergeRequest]) -> None:
    """Check that no given output of a batch overlaps an input or another output of the batch.

    Exact for row-strided memory. Host work only: nothing is launched, allocated on a device or synchronised.
    Outputs that are still to be allocated overlap nothing.

    Args:
        requests: checked requests, all on tensors of one address space.

    Raises:
        ArgumentValueError: naming the output; its `selection` is that output's place in the batch.
    """
    if _boxes_apart(requests):
        return
    read: list[_Item] = []
    written: list[_Item] = []
    for item in sorted(_items(requests), key=lambda item: item.span.start):
        start = item.span.start
        written = [other for other in written if other.span.end > start]
        if item.written:
            read = [other for other in read if other.span.end > start]
            _refuse(item, read)
        _refuse(item, written)
        (written if item.written else read).append(item)


def _refuse(item: _Item, others: list[_Item]) -> None:
    """Raise if `item` overlaps one of `others`; at least one of the two is an output."""
    for other in others:
        if not overlap(item.span, other.span):
            continue
        pair = sorted((item, other), key=lambda x: (not x.written, -x.selection))
        blamed, hit = pair[0], pair[1]
        where = f" of selection {blamed.selection}" if blamed.selection or hit.selection else ""
        there = f" of selection {hit.selection}" if where else ""
        message = (
            f"{blamed.name}{where} is {describe(blamed.tensor)} at {blamed.span.start:#x}; it overlaps {hit.name}"
            f"{there}, {describe(hit.tensor)} at {hit.span.start:#x}; outputs must overlap no input and no other output"
        )
        raise ArgumentValueError(blamed.name, message, blamed.selection)
