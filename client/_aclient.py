"""The client for asyncio: the same flows as `topkd.Client`, awaited."""

# ruff: noqa: ASYNC109 - a time-out of a call is the server's deadline too; `asyncio.timeout` cannot say it

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from topkd import _arrays, _empty, _flows, _region
from topkd._base import ClientBase, PlanBase, batch_entries
from topkd._types import Merge, Selection, SelectResult
from topkd.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self, Unpack

    from topkd._region import Region
    from topkd._types import Array, MergeOptions, SelectOptions, ServerInfo, Wait

__all__ = ["AsyncClient", "AsyncPlan"]


class AsyncClient(ClientBase):
    """A client of a topkd server for asyncio, of any number of loops and tasks.

    The methods are those of `Client`, awaited; streams and lanes are for threads and not among them.

    Calls are cancelled with their tasks. What waits for other things than the reply (attaching, making memory, the CUDA
    stream) waits on threads of the loop's executor.

    Example:
        >>> import asyncio, numpy as np, topkd
        >>> async def main() -> list[list[int]]:
        ...     async with topkd.AsyncClient() as client:
        ...         result = await client.select_topk(np.array([[1, 3, 2]], np.float32), 2, order="value")
        ...         return result.indices.tolist()
        >>> asyncio.run(main())
        [[1, 2]]
    """

    async def connect(self, *, timeout: float | None = None) -> None:
        """Attaches now instead of at the first call. See `Client.connect`."""
        await _flows.adrive(_flows.blocking(self._core, lambda session: None, timeout))

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is. See `Client.info`."""
        return await _flows.adrive(_flows.info(self._core, timeout))

    async def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """Returns a new array or tensor in session memory. See `Client.empty`."""
        sizes, parsed = _empty.check_shape(shape), _arrays.parse_dtype("dtype", dtype)
        try:
            return await _flows.adrive(
                _flows.blocking(self._core, partial(_empty.empty, self._core, sizes, parsed), None)
            )
        except UnavailableError:
            if not self._core.options.local:
                raise
            return _empty.ordinary(sizes, parsed)

    async def register(self, tensor: Any) -> Region:
        """Shares the memory behind an existing CUDA tensor. See `Client.register`."""
        return await _flows.adrive(
            _flows.blocking(self._core, lambda session: _region.register(self._core, tensor, session), None)
        )

    async def select_topk(
        self,
        input: Array,
        k: int,
        *,
        timeout: float | None = None,
        wait: Wait = "stream",
        **options: Unpack[SelectOptions],
    ) -> SelectResult:
        """Selects the k best of each row on the server. See `Client.select_topk`."""
        return (await _flows.adrive(_flows.select(self._core, (Selection(input, k, **options),), timeout, wait)))[0]

    async def select_topk_batch(
        self,
        selections: Iterable[Selection | AsyncPlan],
        *,
        timeout: float | None = None,
        wait: Wait = "stream",
    ) -> list[SelectResult]:
        """Does several selections in one call. See `Client.select_topk_batch`."""
        entries = batch_entries(self._core, selections)
        return await _flows.adrive(_flows.select(self._core, entries, timeout, wait))

    async def plan(
        self,
        input: Array,
        k: int,
        *,
        timeout: float | None = None,
        **options: Unpack[SelectOptions],
    ) -> AsyncPlan:
        """Fixes a selection's arguments once. See `Client.plan`."""
        state = await _flows.adrive(_flows.make_plan(self._core, Selection(input, k, **options), timeout))
        return AsyncPlan(self._core, state)

    async def merge_topk(
        self,
        values: Array,
        indices: Array,
        k: int,
        *,
        timeout: float | None = None,
        **options: Unpack[MergeOptions],
    ) -> SelectResult:
        """Selects the k best of candidates. See `Client.merge_topk`."""
        return (await _flows.adrive(_flows.merge(self._core, (Merge(values, indices, k, **options),), timeout)))[0]

    async def close(self) -> None:
        """Ends the session; calls in flight raise. Arrays in session memory stay valid. Idempotent."""
        await asyncio.to_thread(self._core.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPlan(PlanBase):
    """A selection whose arguments are fixed. Made by `AsyncClient.plan`; usable as an asynchronous context manager."""

    async def run(self, *, timeout: float | None = None, wait: Wait = "stream") -> SelectResult:
        """Selects from what the tensors hold now, into the plan's outputs. See `Plan.run`."""
        return (await _flows.adrive(_flows.select(self._core, (self._state,), timeout, wait)))[0]

    __call__ = run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
