"""Batches: prepared whole, then run as one kernel call a plan key."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from prometheus_client import Counter, Histogram

from topkd import kernels
from topkd.kernels import MergeRequest, SelectRequest, TopKResult
from topkd.v1 import selection_pb2, tensor_pb2

from ._decode import located
from ._logging import Logger
from ._memory import DTYPE_LABELS, PROTO_DTYPES, Backend
from .errors import FieldError, KernelFailedError, ServerError
from .metrics import ServerMetrics, k_class

__all__ = ["FALLBACK_REASONS", "Batch", "Executor", "Request", "fallback_reason"]

FALLBACK_REASONS = ("no_code", "unsupported")
"""A faster family could be neither loaded nor compiled; on a GPU, no family but `torch` serves the request."""

Request = SelectRequest | MergeRequest
_BY_TABLE = "radix_wide"
"""The family that takes tensors of one plan key in one launch, by a table of them, which cannot be captured."""
_RUNS_BEFORE = 2
"""Runs of a batch call by call before it is worth a capture."""
_QUICK_NS = 1_000_000
"""Of a run that may keep the thread that serves: whoever comes meanwhile is told so much later what to do."""
_MOST_RAN = 4096
"""Kinds of calls that are remembered."""


@dataclass(slots=True)
class Call:
    """One kernel call: requests that share a plan key.

    Attributes:
        requests: what it runs.
        places: their places in the batch.
        kernel: the family.
        histogram: takes the seconds of each run.
        fallback: counts each run, if a better kernel should have served it.
    """

    kernel: str
    histogram: Histogram
    fallback: Counter | None = None
    requests: list[Request] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def selections(self) -> list[SelectRequest]:
        """The requests that are selections."""
        return [request for request in self.requests if isinstance(request, SelectRequest)]


@dataclass(slots=True)
class Batch:
    """A checked batch. Can run many times if its tensors lie in regions.

    Attributes:
        paths: path of each entry, for errors.
        calls: kernel calls in order of their first entry.
        rows, input_bytes, output_bytes: sums for the metrics.
        inline: whether any entry's result goes into the reply.
        copied: whether a tensor came inside the message.
        warm: whether `Executor.warm` has made its kernels ready.
        runs: how often it has run, up to the capture.
        replays: what runs its calls, each as a whole; empty before the capture, and if it cannot be.
        quick: whether its last run took little time, wrote all results to regions, and came after the capture.
    """

    paths: list[str]
    calls: list[Call]
    rows: int
    input_bytes: int
    output_bytes: int
    inline: bool
    copied: bool = False
    warm: bool = False
    runs: int = 0
    replays: Sequence[Callable[[], object]] = ()
    quick: bool = False

    @property
    def branches(self) -> bool:
        """Whether a call of it has several selections, which replays run side by side."""
        return any(len(call.requests) > 1 for call in self.calls)


class Executor:
    """Prepares and runs batches on one backend. Not thread-safe: callers have the turn."""

    def __init__(self, backend: Backend, metrics: ServerMetrics, max_reply_bytes: int, log: Logger) -> None:
        self._backend = backend
        self._log = log
        self._may_capture = True
        self._metrics = metrics
        self._max_reply_bytes = max_reply_bytes
        self._histograms: dict[tuple[str, torch.dtype, str], Histogram] = {}
        self._ran: set[Any] = set()

    def prepare(self, requests: Sequence[Request], paths: Sequence[str]) -> Batch:
        """Checks entries against each other and groups them.

        Args:
            requests: checked entries, all selections or all merges.
            paths: path of each, with a dot at its end.

        Raises:
            FieldError: outputs overlap, or the results do not fit in a reply.
        """
        if len(requests) > 1:
            try:
                kernels.check_batch_overlap(requests)  # type: ignore[arg-type]  # of one kind
            except ValueError as error:
                raise located(error, paths[getattr(error, "selection", None) or 0]) from error
        reply_bytes = 0
        for request, path in zip(requests, paths, strict=True):
            reply_bytes += _reply_bytes(request)
            if reply_bytes > self._max_reply_bytes:
                text = f"results of {reply_bytes} bytes do not fit in a reply (max_message_bytes)"
                raise FieldError(f"{text}; name outputs in a region", field=f"{path}out_indices")
        calls: dict[Any, Call] = {}
        for place, request in enumerate(requests):
            kernel, reason = kernels.choose(request) if isinstance(request, SelectRequest) else ("merge", "")
            key = (kernel, request.plan_key)
            if key not in calls:
                calls[key] = Call(kernel, self._histogram(kernel, request), self._fallback(kernel, reason, request))
            calls[key].requests.append(request)
            calls[key].places.append(place)
        sizes = [_sizes(request) for request in requests]
        rows, read, written = (sum(column) for column in zip(*sizes, strict=True))
        inline = any(True for request in requests for _ in _missing(request))  # those without elements too
        return Batch(list(paths), list(calls.values()), rows, read, written, inline)

    def run(self, batch: Batch, lanes: bool = False) -> tuple[list[selection_pb2.SelectionResult], list[int], int]:
        """Runs a batch and waits for the device.

        Args:
            batch: what to run.
            lanes: whether there are lanes, whose streams wait in the device's queues: a graph of several branches
                could come to stand behind one.

        Returns:
            The results in order, the nanoseconds of each kernel call, and those of the turn on the device beyond them.

        Raises:
            KernelFailedError: a kernel raised; what ran before it has written its outputs.
        """
        done: list[tuple[Call, list[TopKResult]]] = []
        try:
            started = time.perf_counter_ns()
            replays = () if lanes and batch.branches else batch.replays
            times = self._backend.run(replays or [_runner(call, done) for call in batch.calls])
            took = time.perf_counter_ns() - started
            waited = max(0, took - sum(times))
            batch.quick = took < _QUICK_NS and batch.runs > _RUNS_BEFORE and not batch.inline
            results = self._results(batch, done, times) if batch.inline else self._alike(batch, times)
            self._note_run(batch)
        except ServerError:
            raise
        except Exception as error:
            raise self._failure(error, batch, done) from error
        return results, times, waited

    def has_run(self, batch: Batch) -> bool:
        """Says whether calls like a batch's have run before, so that the device has all code of theirs."""
        return batch.runs > 0 or all(key in self._ran for key in _kinds(batch))

    def _note_run(self, batch: Batch) -> None:
        if batch.runs == 0:
            if len(self._ran) > _MOST_RAN:
                self._ran.clear()
            self._ran.update(_kinds(batch))
        if batch.runs < _RUNS_BEFORE:
            batch.runs += 1

    def comes_again(self, batch: Batch) -> bool:
        """Says whether a batch has come often enough for `capture`, which has not been called for it."""
        return batch.runs == _RUNS_BEFORE

    def capture(self, batch: Batch) -> None:
        """Has the calls of a batch replayed as a whole from now on, if they can be.

        No stream of the process waits for a word meanwhile. After a capture that failed, which is logged, there is none
        any more.
        """
        batch.runs += 1
        requests = [request for call in batch.calls for request in call.selections]
        if not self._may_capture or batch.inline or batch.copied or len(requests) != len(batch.paths):
            return
        if not all(kernels.only_enqueues(request) and request.rows for request in requests):
            return
        try:
            self.warm(batch)
            batch.replays = [self._captured(call) for call in batch.calls]
        except RuntimeError as error:
            self._may_capture = False
            self._log.warning("batch_not_captured", exc_info=error)

    def _captured(self, call: Call) -> Callable[[], object]:
        if call.kernel == _BY_TABLE and len(call.requests) > 1:
            return partial(kernels.run_select_batch, call.selections, overlap_checked=True)
        return self._backend.capture([partial(kernels.run_select, request) for request in call.selections])

    def warm(self, batch: Batch) -> None:
        """Makes the kernels of a batch ready, so that its launches wait for nothing."""
        if not batch.warm:
            for call in batch.calls:
                for request in call.selections:
                    kernels.warm_select(request)
            batch.warm = True

    def accepted(self, batch: Batch) -> list[selection_pb2.SelectionResult]:
        """Returns what is known of a batch that has been accepted: the kernels."""
        return self._alike(batch, [0] * len(batch.calls))

    def _alike(self, batch: Batch, times: Sequence[int]) -> list[selection_pb2.SelectionResult]:
        """Returns results that hold no tensors: those of one call are one message, which is much faster than many."""
        results: list[Any] = [None] * len(batch.paths)
        for call, nanoseconds in zip(batch.calls, times, strict=True):
            result = selection_pb2.SelectionResult(kernel=call.kernel, device_time_ns=nanoseconds)
            for place in call.places:
                results[place] = result
        return results

    def _results(
        self, batch: Batch, done: list[tuple[Call, list[TopKResult]]], times: Sequence[int]
    ) -> list[selection_pb2.SelectionResult]:
        """Returns results that hold the tensors which lie in no region."""
        results: list[Any] = [None] * len(batch.paths)
        for (call, outputs), nanoseconds in zip(done, times, strict=True):
            for place, request, output in zip(call.places, call.requests, outputs, strict=True):
                result = selection_pb2.SelectionResult(kernel=call.kernel, device_time_ns=nanoseconds)
                _put_inline(result, request, output)
                results[place] = result
        return results

    def _failure(self, error: Exception, batch: Batch, done: Sequence[Any]) -> Exception:
        """Words what a kernel raised; argument errors (data checks) are told by their place in the batch."""
        if hasattr(error, "argument"):
            call = batch.calls[len(done)]
            return located(error, batch.paths[call.places[getattr(error, "selection", None) or 0]])
        return KernelFailedError(f"the kernel failed: {type(error).__name__}: {error}")

    def _histogram(self, kernel: str, request: Request) -> Histogram:
        dtype = request.input.dtype if isinstance(request, SelectRequest) else request.values.dtype
        key = (kernel, dtype, k_class(request.k))
        found = self._histograms.get(key)
        if found is None:
            found = self._metrics.kernel_seconds.labels(kernel, DTYPE_LABELS[dtype], key[2])
            self._histograms[key] = found
        return found

    def _fallback(self, kernel: str, reason: str, request: Request) -> Counter | None:
        """Returns the counter of a choice that fell short, or None."""
        why = fallback_reason(kernel, reason, kernels.failures(), request)
        return None if why is None else self._metrics.fallbacks.labels(kernel, why)


def fallback_reason(kernel: str, reason: str, failures: Mapping[str, str], request: Request) -> str | None:
    """Says why a kernel serves a request that a better one should have.

    Args:
        kernel: who serves it.
        reason: of the choice, as `kernels.choose` words it.
        failures: families without code, as `kernels.failures` gives them.
        request: what is served.

    Returns:
        One of FALLBACK_REASONS, or None: the choice is as it should be, or it was the client's.
    """
    if not isinstance(request, SelectRequest) or request.kernel != "auto":
        return None
    if any(f"{family} has no code" in reason for family in failures):
        return "no_code"
    return "unsupported" if kernel == "torch" and request.input.is_cuda else None


def _runner(call: Call, done: list[tuple[Call, list[TopKResult]]]) -> Callable[[], object]:
    def run() -> None:
        if call.kernel == "merge":
            results = [kernels.run_merge(request) for request in call.requests if isinstance(request, MergeRequest)]
        else:
            results = kernels.run_select_batch(call.selections, overlap_checked=True)
        done.append((call, results))

    return run


def _kinds(batch: Batch) -> list[Any]:
    """Returns, of each call of a batch, what its code on the device depends on, and more."""
    return [
        (call.kernel, request.plan_key, request.rows, batch.inline, batch.copied)
        for call in batch.calls
        for request in call.requests
    ]


def _missing(request: Request) -> Iterator[tuple[str, torch.dtype]]:
    """Yields the outputs that go into the reply, with their dtypes."""
    scores = request.input if isinstance(request, SelectRequest) else request.values
    if request.out_indices is None:
        yield "indices", request.index_dtype if isinstance(request, SelectRequest) else request.indices.dtype
    if request.out_values is None and request.values is not False:  # a merge always has values
        yield "values", scores.dtype


def _reply_bytes(request: Request) -> int:
    rows, columns = request.output_shape
    return sum(rows * columns * dtype.itemsize for _, dtype in _missing(request))


def _put_inline(result: selection_pb2.SelectionResult, request: Request, output: TopKResult) -> None:
    for name, dtype in _missing(request):
        tensor: torch.Tensor = getattr(output, name).contiguous()
        target: tensor_pb2.Tensor = getattr(result, name)
        target.dtype = PROTO_DTYPES[dtype]
        target.shape.extend(tensor.shape)
        target.inline_data = tensor.view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def _sizes(request: Request) -> tuple[int, int, int]:
    """Returns rows, bytes of scores and bytes of results."""
    scores = request.input if isinstance(request, SelectRequest) else request.values
    index = request.index_dtype if isinstance(request, SelectRequest) else request.indices.dtype
    with_values = request.values is not False
    rows, columns = request.output_shape
    written = rows * columns * (index.itemsize + (scores.dtype.itemsize if with_values else 0))
    return rows, scores.numel() * scores.dtype.itemsize, written
