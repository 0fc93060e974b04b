"""The client for threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from topkd import _arrays, _empty, _flows, _region
from topkd._base import ClientBase, PlanBase, batch_entries
from topkd._closing import Closing
from topkd._lane import Lane, open_lane
from topkd._stream import SelectStream
from topkd._types import Merge, Selection, SelectResult
from topkd.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from topkd._region import Region
    from topkd._types import Array, MergeOptions, SelectOptions, ServerInfo, Wait, WaitsBy

__all__ = ["Client", "Plan"]


class Client(ClientBase, Closing):
    """A client of a topkd server, for use from any number of threads.

    The first call attaches; so does the first one after the session was lost, restoring registered memory and plans
    under the same Python objects. A call that was in flight at the loss raises `SessionLostError`. Usable as a context
    manager. After a fork, the child process needs a client of its own.

    Example:
        >>> import numpy as np, topkd
        >>> with topkd.Client() as client:
        ...     scores = client.empty((2, 6), "float32")
        ...     scores[:] = [[1, 9, 3, 7, 5, 2], [4, 0, 8, 6, 2, 9]]
        ...     result = client.select_topk(scores, 3, order="value", values=True)
        >>> result.indices.tolist()
        [[1, 3, 4], [5, 2, 3]]
        >>> result.values.tolist()
        [[9.0, 7.0, 5.0], [9.0, 8.0, 6.0]]
    """

    def connect(self, *, timeout: float | None = None) -> None:
        """Attaches now instead of at the first call.

        Raises:
            UnavailableError: No server took the client in time.
            TopkdError: A server refused it.
        """
        _flows.drive(_flows.blocking(self._core, lambda session: None, timeout))

    def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is: version, device, kernels, limits, sessions.

        Example:
            >>> print(client.info().device.backend.value)
            cpu
        """
        return _flows.drive(_flows.info(self._core, timeout))

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """Returns a new array or tensor in memory that the server shares: selections from it copy nothing.

        Its contents are undefined. The memory stays as long as the array or any view of it, after `close` too.

        Args:
            shape: One or more sizes.
            dtype: bfloat16, float16, float32, int32 or int64. A torch dtype gives a tensor on the server's device; a
                numpy dtype gives an array (CPU servers only; bfloat16 needs the package `ml_dtypes`); a name gives an
                array on CPU servers and a tensor on CUDA servers.

        Raises:
            RegionError: The session shares no memory (TCP).
            ResourceExhaustedError: A limit of the server.

        Example:
            >>> client.empty(4, np.int32).shape
            (4,)
        """
        sizes, parsed = _empty.check_shape(shape), _arrays.parse_dtype("dtype", dtype)
        try:
            return _flows.drive(_flows.blocking(self._core, partial(_empty.empty, self._core, sizes, parsed), None))
        except UnavailableError:
            if not self._core.options.local:
                raise
            return _empty.ordinary(sizes, parsed)

    def register(self, tensor: Any) -> Region:
        """Shares the memory behind an existing CUDA tensor: selections from it, or any view of it, copy nothing.

        The whole allocation behind the tensor becomes visible to the server: what else torch's caching allocator has
        put there, too; `Region.shared` says how much. `Client.empty` shares nothing else.

        Raises:
            RegionError: It cannot be shared, and why: ordinary host memory, another device, memory whose owner has
                made it so that it cannot.
        """
        return _flows.drive(
            _flows.blocking(self._core, lambda session: _region.register(self._core, tensor, session), None)
        )

    def select_topk(
        self,
        input: Array,
        k: int,
        *,
        timeout: float | None = None,
        wait: Wait = "stream",
        **options: Unpack[SelectOptions],
    ) -> SelectResult:
        """Selects the k best of each row on the server.

        CPU arrays: waits for the result. CUDA tensors: the selection is ordered on their device's current stream like a
        kernel, and the call returns when the server has accepted it, without waiting for the stream; `check` says
        whether it failed later. Arrays outside session memory are copied there first, outputs outside of it afterwards.
        Results live in session memory that is reused once they are gone.

        Args:
            input: Scores (rows, width): bfloat16, float16 or float32.
            k: Elements selected a row, 1 .. 2^20.
            timeout: Seconds; None for the client's.
            wait: "stream", or "host": wait for the stream first, then for the result, CUDA tensors or not.
            **options: As `topkd.kernels.select_topk` takes them; see `Selection`.

        Raises:
            ArgumentTypeError: A wrong Python type or dtype; `.argument` names it.
            ArgumentValueError: Another argument that the contract refuses.
            UnavailableError: No server is there; `SessionLostError` if it went away during the call.
            DeadlineExceededError: The time-out passed.
            CaptureError: The current stream is capturing a CUDA graph; nothing was sent.

        Example:
            >>> scores = np.array([[1, 9, 3], [4, 0, 8]], np.float32)
            >>> print(client.select_topk(scores, 2, lengths=np.array([3, 1], np.int32), order="value").indices)
            [[ 1  2]
             [ 0 -1]]
        """
        return _flows.drive(_flows.select(self._core, (Selection(input, k, **options),), timeout, wait))[0]

    def select_topk_batch(
        self, selections: Iterable[Selection | Plan], *, timeout: float | None = None, wait: Wait = "stream"
    ) -> list[SelectResult]:
        """Does several selections in one call; plans may be among them. All are checked before any runs.

        Raises:
            ArgumentError: `.selection` is the place of the entry that is wrong. Else as `select_topk`.

        Example:
            >>> scores = np.arange(8, dtype=np.float32).reshape(2, 4)
            >>> batch = [topkd.Selection(scores, 1), topkd.Selection(scores, 1, largest=False)]
            >>> [result.indices.tolist() for result in client.select_topk_batch(batch)]
            [[[3], [3]], [[0], [0]]]
        """
        entries = batch_entries(self._core, selections)
        return _flows.drive(_flows.select(self._core, entries, timeout, wait))

    def plan(self, input: Array, k: int, *, timeout: float | None = None, **options: Unpack[SelectOptions]) -> Plan:
        """Fixes a selection's arguments once: checked, its kernel chosen and warmed. Its runs then send a number.

        Every tensor must be in session memory. Outputs that are not given are the plan's own: each run overwrites them.

        Args:
            input: As for `select_topk`; its contents, and those of `lengths` and tables, are read anew in every run.
            k: Elements selected a row.
            timeout: Seconds; None for the client's.
            **options: As for `select_topk`.

        Raises:
            ArgumentError: An argument that is wrong, or not in session memory.

        Example:
            >>> scores = client.empty((1, 4), "float32")
            >>> plan = client.plan(scores, 1)
            >>> scores[:] = [[3, 1, 4, 1]]
            >>> plan().indices.tolist()
            [[2]]
        """
        state = _flows.drive(_flows.make_plan(self._core, Selection(input, k, **options), timeout))
        return Plan(self._core, state)

    def lane(
        self,
        *plans: Plan,
        timeout: float | None = None,
        waits_by: WaitsBy = "operations",
    ) -> Lane:
        """Opens a lane: calls of these plans then need no request, and can be captured in CUDA graphs.

        Args:
            *plans: What the lane calls.
            timeout: Seconds that a call may take; None for the client's. A lane of which one takes longer is broken.
            waits_by: What calls on a stream are: "operations" of memory, or a "kernel" of one thread that waits on the
                GPU, which costs less, needs MPS, and may keep other processes from starting on the GPU.

        Raises:
            ArgumentError: There is no plan, or one of them is none of this client's; or there is no such `waits_by`.
            RegionError: The session shares no memory (TCP), the server has no lanes, no watchdog can be started, or a
                kernel is asked for and cannot be.
            ResourceExhaustedError: As many lanes as may be are open.

        Example:
            >>> scores = client.empty((1, 4), "float32")
            >>> scores[:] = [[3, 1, 4, 1]]
            >>> with client.lane(client.plan(scores, 1), client.plan(scores, 1, largest=False)) as lane:
            ...     lane.call_host().indices.tolist()
            [[2]]
        """
        return open_lane(self._core, plans, timeout, waits_by)

    def stream(self) -> SelectStream:
        """Returns an open stream for selections: a call over it costs a thread about half, and many may be under way.

        It connects with its first call. Close it, or use it as a context manager.

        Raises:
            ClientClosedError: The client is closed.
            ForkError: This is a forked child of the process that made it.

        Example:
            >>> scores = client.empty((1, 4), "float32")
            >>> scores[:] = [[3, 1, 4, 1]]
            >>> with client.stream() as stream:
            ...     pending = [stream.submit([topkd.Selection(scores, k)]) for k in (1, 2)]
            ...     [one.result()[0].indices.tolist() for one in pending]
            [[[2]], [[2, 0]]]
        """
        self._core.check_usable()
        return SelectStream(self._core)

    def merge_topk(
        self, values: Array, indices: Array, k: int, *, timeout: float | None = None, **options: Unpack[MergeOptions]
    ) -> SelectResult:
        """Selects the k best of candidates from any number of parts, by their global indices. Waits for the result.

        Args:
            values: Scores of the candidates (rows, candidates).
            indices: Their global indices (rows, candidates), int32 or int64; -1 is no candidate.
            k: Elements selected a row.
            timeout: Seconds; None for the client's.
            **options: As `topkd.kernels.merge_topk` takes them: largest, order, ties, out_indices, out_values.

        Raises:
            TopkdError: As `select_topk`.

        Example:
            >>> values = np.array([[5, 3, 9, 1]], np.float32)
            >>> merged = client.merge_topk(values, np.array([[10, 11, 70, 71]], np.int32), 2, order="value")
            >>> merged.indices.tolist(), merged.values.tolist()
            ([[70, 10]], [[9.0, 5.0]])
        """
        return _flows.drive(_flows.merge(self._core, (Merge(values, indices, k, **options),), timeout))[0]

    def close(self) -> None:
        """Ends the session; calls in flight raise. Arrays in session memory stay valid. Idempotent."""
        self._core.close()


class Plan(PlanBase, Closing):
    """A selection whose arguments are fixed. Made by `Client.plan`; usable as a context manager."""

    def run(self, *, timeout: float | None = None, wait: Wait = "stream") -> SelectResult:
        """Selects from what the tensors hold now, into the plan's outputs. Ordered and waited for as `select_topk`.

        Raises:
            TopkdError: As `Client.select_topk`.
        """
        return _flows.drive(_flows.select(self._core, (self._state,), timeout, wait))[0]

    __call__ = run

    def lane(self, *, timeout: float | None = None, waits_by: WaitsBy = "operations") -> Lane:
        """Opens a lane for this plan alone. See `Client.lane`."""
        return open_lane(self._core, (self,), timeout, waits_by)
