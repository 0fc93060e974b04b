"""Plans of all kinds over session memory, each with inputs whose answers the oracle has given, on the CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests import oracle
from tests.case import FORMATS, Array, Case

__all__ = ["Work", "draw_case"]

DATA: Final = 3
"""Inputs of a plan: each call takes another one than the call before it."""

_UNTOUCHED: Final = -7
_SHAPES: Final = ((1, 4096, 64), (2, 700, 30), (4, 96, 100), (3, 1500, 512), (1, 9000, 256), (8, 128, 8))


def draw_case(rng: np.random.Generator) -> Case:
    """Returns a request that has one legal answer only, bit for bit."""
    rows, width, k = _SHAPES[rng.integers(len(_SHAPES))]
    dtype = str(rng.choice(list(FORMATS)))
    group = int(rng.choice([1, 1, 1, 8]))
    order = str(rng.choice(["index", "value"] if group == 1 else ["index"]))
    options: dict[str, Any] = {"ties": str(rng.choice(["lowest", "highest"])), "values": bool(rng.integers(2))}
    if group == 1:
        options["largest"] = bool(rng.integers(4))
    if rng.integers(2):
        options["lengths"] = rng.integers(0, width + 1, rows).astype(np.int32)
    return Case(
        storage=draw_bits(rng, dtype, rows * width), dtype=dtype, rows=rows, width=width, k=k, group=group, order=order,
        **options,
    )  # fmt: skip


def draw_bits(rng: np.random.Generator, dtype: str, count: int) -> Array:
    """Returns scores: ordinary ones, many that are equal, or any bits at all, NaN and infinities among them."""
    layout = FORMATS[dtype]
    kind = rng.integers(3)
    if kind == 0:
        return rng.integers(0, np.iinfo(layout.bits).max, count, dtype=layout.bits, endpoint=True)
    if kind == 1:  # few values: ties everywhere
        few = rng.integers(0, layout.inf, 5, dtype=layout.bits)
        return few[rng.integers(0, 5, count)]
    return rng.integers(layout.inf // 2, layout.inf, count, dtype=layout.bits)


@dataclass
class _Data:
    """An input and the answer to it, where calls read and compare them."""

    scores: Any
    lengths: Any
    indices: Any
    values: Any


class Work:
    """A plan in a session's memory. `bits` of a tensor are integers: NaNs are compared, too.

    Attributes:
        plan: The client's.
        case: What it was made from.
    """

    def __init__(self, client: Any, rng: np.random.Generator, cuda: bool) -> None:
        """Makes the plan and asks the oracle for its answers."""
        self.case = case = draw_case(rng)
        self._cuda = cuda
        shape, outputs = (case.rows, case.width), (case.rows, case.k)
        self._scores = client.empty(shape, _dtype(case.dtype, cuda))
        self._out = client.empty(outputs, _dtype("int32", cuda))
        self._values = client.empty(outputs, _dtype(case.dtype, cuda)) if case.values else None
        self._lengths = client.empty((case.rows,), _dtype("int32", cuda)) if case.lengths is not None else None
        if self._lengths is not None:
            self._lengths[:] = self._here(case.lengths)
        options = {"largest": case.largest, "order": case.order, "ties": case.ties, "group": case.group}
        self.plan = client.plan(
            self._scores, case.k, lengths=self._lengths, values=case.values, out_indices=self._out,
            out_values=self._values, timeout=120.0, **options,
        )  # fmt: skip
        self._data = [self._draw(rng) for _ in range(DATA)]
        self._next = 0

    def _draw(self, rng: np.random.Generator) -> _Data:
        case = self.case
        changes: dict[str, Any] = {"storage": draw_bits(rng, case.dtype, case.rows * case.width)}
        if case.lengths is not None:
            changes["lengths"] = rng.integers(0, case.width + 1, case.rows).astype(np.int32)
        drawn = Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, **changes})
        want = oracle.expected(drawn)
        assert all(want.unique), drawn
        scores = drawn.storage.reshape(case.rows, case.width)
        lengths = None if drawn.lengths is None else self._here(drawn.lengths)
        values = None if want.values is None else self._here(want.values)
        return _Data(self._here(scores), lengths, self._here(want.indices.astype(np.int32)), values)

    def _here(self, array: Any) -> Any:
        """Returns an array's bits where the calls are."""
        signed = np.ascontiguousarray(array).view(f"int{array.dtype.itemsize * 8}")
        if not self._cuda:
            return signed
        import torch

        return torch.from_numpy(signed.copy()).cuda()

    def _bits(self, array: Any) -> Any:
        if not self._cuda:
            return array.view(f"int{array.dtype.itemsize * 8}")
        import torch

        return array.view({2: torch.int16, 4: torch.int32}[array.element_size()])

    def feed(self) -> _Data:
        """Puts the next input in place and spoils the outputs; on a GPU, in the current stream."""
        self._next = (self._next + 1) % DATA
        data = self._data[self._next]
        self._bits(self._scores)[:] = data.scores
        if self._lengths is not None:
            self._lengths[:] = data.lengths
        self._out[:] = _UNTOUCHED
        if self._values is not None:
            self._bits(self._values)[:] = _UNTOUCHED
        return data

    def differences(self, data: _Data) -> Any:
        """Returns how many elements of the outputs are not what they must be; on a GPU a tensor, in stream order."""
        count = (self._out != data.indices).sum()
        if self._values is not None:
            count = count + (self._bits(self._values) != data.values).sum()
        return count


def _dtype(name: str, cuda: bool) -> Any:
    """Returns a dtype as `Client.empty` takes it."""
    if not cuda:
        return name
    import torch

    return getattr(torch, name)
