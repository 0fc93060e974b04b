"""The ways to have a request served, in process and by a server, behind one interface.

`Backend.run(case)` puts the case's bits into tensors, makes the call, and judges it: the answer by the oracle, and
beyond it that inputs are as they were, that given outputs come back as they are, and that nothing around them was
written.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Protocol

import numpy as np
import torch

from tests.oracle import Case, MergeCase, check, check_merge

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TORCH_INT = {"int32": torch.int32, "int64": torch.int64, "uint16": torch.int16, "uint32": torch.int32}
NUMPY_UINT = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
VECTORS = ("lengths", "row_starts", "row_offsets", "row_to_table", "table_starts")
VIEW = {"storage", "dtype", "rows", "width", "row_stride", "col_stride", "storage_offset", "k", "note"}
OUTPUT = {"out_pad", "out_offset", "table_pad", "index_dtype", "page_table", *VECTORS}
MARGIN = 8
"""Elements behind each given output that must stay as they are."""


class Api(Protocol):
    """What is tested: memory that the callee can see, and the two calls."""

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor."""

    def select_topk(self, input: torch.Tensor, k: int, **options: Any) -> Any:
        """As the contract has it."""

    def merge_topk(self, values: torch.Tensor, indices: torch.Tensor, k: int, **options: Any) -> Any:
        """As the contract has it."""


class InProcess:
    """`topkd.kernels`, on tensors of one device."""

    def __init__(self, device: str) -> None:
        """Use `device`, "cpu" or "cuda"."""
        from topkd import kernels

        self.device = device
        self.select_topk = kernels.select_topk
        self.merge_topk = kernels.merge_topk

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor on the device."""
        return torch.empty(size, dtype=dtype, device=self.device)


class Remote:
    """A client of a server process."""

    def __init__(self, client: Any) -> None:
        """Use an attached client."""
        self.client = client
        self.select_topk = client.select_topk
        self.merge_topk = client.merge_topk

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in memory that the server sees."""
        tensor: torch.Tensor = self.client.empty((size,), dtype)
        return tensor


class Backend:
    """One way to have cases served; see the module."""

    def __init__(self, name: str, api: Api) -> None:
        """Name it for messages, and give what serves it."""
        self.name = name
        self.api = api

    def tensor(self, array: np.ndarray[Any, Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A flat copy of an array of integers, seen as `dtype`; at least one element of memory."""
        flat = torch.from_numpy(np.ascontiguousarray(array).ravel().view(f"int{array.itemsize * 8}"))
        memory = self.api.empty(max(1, flat.numel()), dtype or flat.dtype)
        memory.view(flat.dtype)[: flat.numel()].copy_(flat)
        return memory[: flat.numel()]

    def run(self, case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Serve a selection and judge it; returns indices and the bits of values."""
        inputs, outputs = _Inputs(), _Outputs()
        view, options = self._request(case, inputs, outputs)
        result = self.api.select_topk(view, case.k, **options)
        indices, values = self._finish(case, result, inputs, outputs)
        check(case, indices, values)
        return indices, values

    def unmet(self, case: Case) -> str | None:
        """What `supports` says of the kernel family that the case forces (in process only)."""
        from topkd import kernels

        view, options = self._request(case, _Inputs(), _Outputs())
        return kernels.supports(options.pop("kernel"), view, case.k, **options)

    def _request(self, case: Case, inputs: _Inputs, outputs: _Outputs) -> tuple[torch.Tensor, dict[str, Any]]:
        """The input and the options as tensors and torch dtypes."""
        storage = inputs.keep(self.tensor(case.storage, TORCH[case.dtype]))
        view = strided(storage, (case.rows, case.width), (case.stride, case.col_stride), case.storage_offset)
        options = _plain_options(case)
        for name in VECTORS:
            if getattr(case, name) is not None:
                options[name] = inputs.keep(self.tensor(getattr(case, name)))
        if case.page_table is not None:
            padded = np.pad(case.page_table, ((0, 0), (0, case.table_pad)), constant_values=1)
            table = inputs.keep(self.tensor(padded))
            options["page_table"] = strided(table, case.page_table.shape, (padded.shape[1], 1))
        if case.index_dtype != "int32":
            options["index_dtype"] = TORCH_INT[case.index_dtype]
        if case.out_pad is not None:
            outputs["indices"] = self._output(case.rows, case.columns, TORCH_INT[case.index_dtype], case)
            if case.values:
                outputs["values"] = self._output(case.rows, case.k, TORCH[case.dtype], case)
        return view, options | outputs.arguments()

    def merge(self, case: MergeCase) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Serve a merge and judge it; returns indices and the bits of values."""
        inputs, outputs = _Inputs(), _Outputs()
        rows, count = case.values.shape
        stride = count + case.row_pad
        values = np.pad(case.values, ((0, 0), (0, case.row_pad)))
        scores = strided(inputs.keep(self.tensor(values, TORCH[case.dtype])), (rows, count), (stride, 1))
        padded = np.pad(case.indices, ((0, 0), (0, case.row_pad)))
        indices = strided(inputs.keep(self.tensor(padded)), (rows, count), (stride, 1))
        options = {name: getattr(case, name) for name in ("largest", "order", "ties")}
        if case.out_pad is not None:
            outputs["indices"] = self._output(rows, case.k, indices.dtype, case)
            outputs["values"] = self._output(rows, case.k, scores.dtype, case)
        result = self.api.merge_topk(scores, indices, case.k, **options, **outputs.arguments())
        merged, bits = self._finish(case, result, inputs, outputs)
        assert bits is not None, "a merge always writes values"
        check_merge(case, merged, bits)
        return merged, bits

    def _output(self, rows: int, columns: int, dtype: torch.dtype, case: Case | MergeCase) -> _Output:
        assert case.out_pad is not None
        stride = columns + case.out_pad
        memory = self.api.empty(case.out_offset + rows * stride + MARGIN, dtype)
        return _Output(memory, (rows, columns, stride), case.out_offset)

    def _finish(
        self, case: Case | MergeCase, result: Any, inputs: _Inputs, outputs: _Outputs
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Everything but the answer itself is as it should be; the answer as arrays of integers."""
        for name, output in outputs.items():
            assert getattr(result, name) is output.view, f"out_{name} was given and another tensor came back\n{case!r}"
        indices = result.indices.cpu().numpy()  # after this the work on the stream is over
        values = None
        if result.values is not None:
            assert result.values.dtype == TORCH[case.dtype], f"values came as {result.values.dtype}\n{case!r}"
            unsigned = NUMPY_UINT[case.dtype]
            values = _integers(result.values.contiguous()).cpu().numpy().view(unsigned)
        inputs.check(case)
        for name, output in outputs.items():
            output.check(name, case)
        return indices, values


def _plain_options(case: Case) -> dict[str, Any]:
    """The options that differ from their defaults and are no tensors."""
    options = {}
    for one in fields(case):
        value = getattr(case, one.name)
        if one.name not in VIEW | OUTPUT and one.default is not MISSING and value != one.default:
            options[one.name] = value
    return options


def strided(memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """A view whose offset counts from the first element of `memory`, wherever in its storage that is."""
    return memory.as_strided(shape, strides, memory.storage_offset() + offset)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: comparisons of floats would take NaN for unequal and -0.0 for 0.0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class _Inputs:
    """Tensors that a call must leave as they were."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append((tensor, tensor.clone()))
        return tensor

    def check(self, case: Case | MergeCase) -> None:
        for now, before in self.kept:
            assert torch.equal(_integers(now), _integers(before)), f"an input was modified\n{case!r}"


class _Output:
    """An output view inside a larger tensor whose other elements must stay as they are."""

    def __init__(self, memory: torch.Tensor, layout: tuple[int, int, int], offset: int) -> None:
        rows, columns, stride = layout
        _integers(memory).fill_(0x5A5A)
        self.memory = memory
        self.layout = (rows, columns), (stride, 1), offset
        self.view = strided(memory, *self.layout)

    def check(self, name: str, case: Case | MergeCase) -> None:
        around = _integers(self.memory.clone())
        strided(around, *self.layout).fill_(0x5A5A)
        if not bool((around == 0x5A5A).all()):
            at = torch.nonzero(around != 0x5A5A).flatten().tolist()[:8]
            raise AssertionError(f"elements {at} outside the rows of out_{name} were written\n{case!r}")


class _Outputs(dict[str, _Output]):
    """The given outputs, by the name that the result has them under."""

    def arguments(self) -> dict[str, torch.Tensor]:
        return {f"out_{name}": output.view for name, output in self.items()}
