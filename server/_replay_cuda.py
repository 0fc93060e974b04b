"""Kernel calls as CUDA graphs: a batch that comes again is launched as a whole instead of kernel by kernel.

A launch from Python costs about 11 us, 64 of them more than the round trip of the call; the replay of a graph of them
costs about 10. Kernels of one call are independent of each other: they are captured on several branches, which the
device runs side by side.

While a stream of the process waits for a word, the driver may hold up the making and destroying of graphs. The caller
captures only where no stream can be waiting; graphs that are given up are destroyed at such a moment, too.
"""

from collections.abc import Callable, Sequence

import torch

__all__ = ["Replays"]

BRANCHES = 8


class _Replay:
    """A graph, as something to call. Given up, it is put where graphs wait for their destruction."""

    def __init__(self, graph: torch.cuda.CUDAGraph, given_up: list[torch.cuda.CUDAGraph]) -> None:
        self._graph = graph
        self._given_up = given_up

    def __call__(self) -> None:
        """Launches it on the current stream."""
        self._graph.replay()

    def __del__(self) -> None:
        self._given_up.append(self._graph)


class Replays:
    """Makes graphs on one stream. Their scratch memory is shared: one of them runs at a time. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._branches: list[torch.cuda.Stream] = []
        self._given_up: list[torch.cuda.CUDAGraph] = []
        # The memory is taken as the first graph's, which therefore stays: torch takes no pool of graphs that are gone.
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, runs: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """Captures what runs enqueue on the current stream, which is none of those that wait; runs nothing.

        Raises:
            RuntimeError: a run cannot be captured, or the memory does not suffice. Torch takes the memory for under
                capture from then on, so that no other capture should follow.
        """
        self._given_up.clear()
        while len(self._branches) < min(BRANCHES, len(runs)) - 1:
            self._branches.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._fork(runs, torch.cuda.current_stream(self._device))
        finally:
            graph.capture_end()
        self._first = self._first or graph
        return _Replay(graph, self._given_up)

    def _fork(self, runs: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> None:
        streams = [stream, *self._branches[: len(runs) - 1]]
        for branch in streams[1:]:
            branch.wait_stream(stream)
        for place, run in enumerate(runs):
            with torch.cuda.stream(streams[place % len(streams)]):
                run()
        for branch in streams[1:]:
            stream.wait_stream(branch)
