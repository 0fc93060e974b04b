"""A client process: `python -m tests.chaos.engine SOCKET_DIR DEVICE SEED`. It speaks in lines of JSON.

It opens a lane over some plans and calls it until its standard input ends. A session that is lost is no failure: the
next one's lane is opened. An answer that is wrong, a call that is late, and any other error are.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Final

import numpy as np

import topkd
from tests.chaos.work import Work
from tests.e2e.processes import listener

CALL_S: Final = 20.0
"""That a call may take: the machine is busy, and a worker's death is told within this time."""

_BEAT_S: Final = 0.5
_PLANS: Final = (1, 3)
"""A lane of one plan may be armed on a GPU, one of several is polled."""

_GRAPH_CALLS: Final = 16


def say(**what: object) -> None:
    """Writes one line."""
    print(json.dumps(what), flush=True)


class Engine:
    """The client's loop."""

    def __init__(self, client: topkd.Client, device: str, seed: int) -> None:
        self._client = client
        self._cuda = device == "cuda"
        self._rng = np.random.default_rng(seed)
        self._works = [Work(client, self._rng, self._cuda) for _ in range(self._rng.choice(_PLANS))]
        self.counts = {"calls": 0, "wrong": 0, "lost": 0}

    def run(self, ended: threading.Event) -> None:
        """Calls until the end; a lost session's lane is replaced."""
        while not ended.is_set():
            try:
                with self._client.lane(*(work.plan for work in self._works), timeout=CALL_S) as lane:
                    say(state="calling", mode=lane.mode, worker=self._worker(), **self.counts)
                    self._call(lane, ended)
            except topkd.UnavailableError as error:  # the session was lost: SessionLostError is one
                self.counts["lost"] += 1
                say(state="lost", error=repr(error)[:300], **self.counts)

    def _call(self, lane: topkd.Lane, ended: threading.Event) -> None:
        rounds = [self._by_host]
        if self._cuda:
            rounds += [self._eager, self._captured(lane)]
        beat = 0.0
        while not ended.is_set():
            work = self._works[self._rng.integers(len(self._works))]
            calls, differences = rounds[self._rng.integers(len(rounds))](lane, work)
            lane.check()  # what an ended session has left in the outputs is no answer
            self.counts["calls"] += calls
            if differences:
                self.counts["wrong"] += 1
                say(state="wrong", differences=differences, case=repr(work.case)[:2000], **self.counts)
            if time.monotonic() > beat + _BEAT_S:
                beat = time.monotonic()
                say(state="calling", **self.counts)

    def _worker(self) -> int:
        """Returns the process that serves the session; 0 if it has gone."""
        try:
            return listener(self._client._core.session._data_path)  # type: ignore[union-attr]
        except (AttributeError, OSError):
            return 0

    def _by_host(self, lane: topkd.Lane, work: Work) -> tuple[int, int]:
        data = work.feed()
        self._synchronize()
        lane.call_host(work.plan)
        return 1, int(work.differences(data))

    def _eager(self, lane: topkd.Lane, work: Work) -> tuple[int, int]:
        total = 0
        for one in (work, *self._works):
            data = one.feed()
            lane(one.plan)
            total = total + one.differences(data)
        self._synchronize()
        return 1 + len(self._works), int(total)

    def _captured(self, lane: topkd.Lane) -> Any:
        """Returns a round that replays a graph of calls of all plans."""
        import torch

        for work in self._works:  # loads what a first call loads
            lane(work.plan)
            work.differences(work.feed())
        torch.cuda.synchronize()
        graph, total = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.graph(graph):
            total.zero_()
            for call in range(_GRAPH_CALLS):
                work = self._works[call % len(self._works)]
                data = work.feed()
                lane(work.plan)
                total += work.differences(data)

        def replay(_: topkd.Lane, __: Work) -> tuple[int, int]:
            graph.replay()
            torch.cuda.synchronize()
            return _GRAPH_CALLS, int(total)

        return replay

    def _synchronize(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()


def main(target: str, device: str, seed: str) -> None:
    """Runs it."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    try:
        with topkd.Client(Path(target), name=f"chaos {seed}", attach_timeout=180, timeout=60) as client:
            say(state="attaching")
            client.connect()
            engine = None
            while engine is None and not ended.is_set():
                try:
                    engine = Engine(client, device, int(seed))
                except topkd.UnavailableError as error:
                    say(state="lost", error=repr(error)[:300])
            if engine is not None:
                engine.run(ended)
                say(state="ended", **engine.counts)
    except Exception:  # noqa: BLE001  # whatever it is, it is told
        say(state="failed", error=traceback.format_exc()[-3000:])
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
