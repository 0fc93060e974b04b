"""What becomes of a call's outputs: results, copies to the caller's own arrays, and checks that staging would hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from topkd import _arrays, _codec
from topkd._arrays import HOST
from topkd._types import SelectResult
from topkd.errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topkd._arrays import View

__all__ = ["Output", "check_given", "check_overlaps"]


@dataclass(slots=True)
class Output:
    """How one entry's result comes about.

    Attributes:
        library: Of new arrays.
        device: torch device of new tensors, None for the host.
        indices: Where the server wrote them, None if the reply carries them.
        given_indices: The caller's array to copy them to, if the server could not write there.
        values: As `indices`; None too if no values were asked for.
        given_values: As `given_indices`.
        in_place: Whether it is known that the server writes all results where the caller wants them.
    """

    library: str
    device: Any
    indices: Any
    given_indices: View | None
    values: Any
    given_values: View | None
    in_place: bool = False

    def is_there(self, entry: Any) -> bool:
        """Says whether the server has written an entry's results where the caller wants them."""
        if self.indices is None or self.given_indices is not None or self.given_values is not None:
            return False
        return self.values is not None or not entry.HasField("values")

    def result(self, entry: Any, queue_time: float) -> SelectResult:
        """Reads an entry of the reply."""
        indices, values = self.indices, self.values
        if not self.in_place and not self.is_there(entry):
            indices = self._deliver(indices, self.given_indices, entry, "indices")
            values = self._deliver(values, self.given_values, entry, "values")
        return SelectResult(indices, values, entry.kernel, entry.device_time_ns * 1e-9, queue_time)

    def _deliver(self, array: Any, given: View | None, entry: Any, field: str) -> Any:
        if array is None:
            if not entry.HasField(field):
                return None
            array = _codec.read_inline(getattr(entry, field), given.library if given is not None else self.library)
            if given is None:
                return array if self.device is None else array.to(self.device)
        elif given is None:
            return array
        copy_out(array, given)
        return given.array


def copy_out(array: Any, given: View) -> None:
    """Copies a result to the caller's array, bit for bit."""
    if given.device != HOST:
        given.array.copy_(array)
    else:
        np.copyto(_arrays.bits(given), _arrays.bits(_arrays.describe("result", array)))


def check_given(name: str, view: View, wanted: tuple[int, tuple[int, ...]] | None, place: int) -> None:
    """Checks an output that the server will not see: its shape, its dtype, and that its rows are apart."""
    if wanted is None:
        return
    code, shape = wanted
    if view.shape != shape:
        raise ArgumentValueError(f"{name} has shape {view.shape}; it must be {shape}", argument=name, selection=place)
    if view.code != code:
        raise ArgumentTypeError(
            f"{name} has dtype {_arrays.dtype_name(view.code)}; it must be {_arrays.dtype_name(code)}",
            argument=name,
            selection=place,
        )
    if shape[0] > 1 and view.strides[0] < shape[1]:
        raise ArgumentValueError(
            f"{name} has strides {view.strides}: its rows of {shape[1]} overlap", argument=name, selection=place
        )


def check_overlaps(views: Sequence[tuple[int, str, View]]) -> None:
    """Checks that no output overlaps another tensor of the batch.

    The server checks what it sees; staged tensors are apart there even if the caller's are not. Of two outputs the one
    is named that `topkd.kernels` names: of the later selection, else at the higher address, else `out_values`.
    """
    spans = sorted(
        (
            (v.address, v.address + _arrays.extent(v), name.startswith("out_"), place, name, v)
            for place, name, v in views
        ),
        key=lambda span: span[0],
    )
    for at, (_, end, written, place, name, view) in enumerate(spans):
        for start, _, other_written, other_place, other_name, other in spans[at + 1 :]:
            if start >= end:
                break
            if (written or other_written) and _meet(view, other):
                if (other_written, other_place) >= (written, place):
                    place, name, other_place, other_name = other_place, other_name, place, name
                raise ArgumentValueError(
                    f"{name} of selection {place} overlaps {other_name} of selection {other_place}; outputs must "
                    "overlap no input and no other output",
                    argument=name,
                    selection=place,
                )


def _meet(first: View, second: View) -> bool:
    """Says exactly whether two views share a byte; column slices of one buffer do not. Reads no memory."""
    return first.device == second.device and np.shares_memory(_arrays.memory(first), _arrays.memory(second))
