"""Armed lanes: the worker's stream waits for the request word, so that no CPU is in a call.

`Rounds` are what a backend keeps in a stream for one lane: many times wait, kernels, answer, ahead of the calls; an
answer counts the lane's calls in the page, too. A thread here puts new ones behind them as they are used up.

What waits in a stream holds up other calls of the process: memory cannot be freed or unmapped, code not loaded. So
whoever is about to do such a thing *holds* the lanes: their rounds are given up, so that they write nothing of the
client's, and the stream runs empty. A call that comes meanwhile stays in the request word and is served when the lanes
are armed again. Who forgets to hold them, or cannot know (torch loads code when it first needs it), is found by a
second thread: a turn, or a launch, that takes long is taken for one that the rounds hold up, and they are given up
until it is over.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from topkd.v1 import selection_pb2

from ._execute import Batch
from ._lanes import Dispatch, Lane
from ._logging import Logger
from ._queue import TurnQueue
from .errors import KernelFailedError, ServerError
from .metrics import ServerMetrics

__all__ = ["Armed", "CannotArmError", "Rounds"]

_REFILL_S = (0.4e-3, 1e-3)
"""Between looks for rounds that were used up: in the first seconds after a call, and later."""
_BUSY_S = 2.0
_GIVEN_UP_S = 50e-6
"""Between stores that keep given-up rounds going."""
_SUSPICIOUS_S = 0.03
"""A turn or a launch that takes so long may be held up by armed rounds."""
_GUARD_S = 5e-3
_NONE_S = 0.5
_IDLE_TIMEOUT_S = 5.0
"""That given-up rounds have to end; they only run kernels."""


class CannotArmError(ServerError):
    """A lane cannot be armed; the text says why."""


class Rounds(Protocol):
    """What is kept in a stream for one lane.

    Attributes:
        batch: what a round runs.
        most: rounds in the stream when none is used up.
    """

    batch: Batch
    most: int

    def arm(self) -> int:
        """Puts rounds into the stream, which is empty, forgets that some were given up, and says how many they are."""

    def refill(self) -> int:
        """Puts as many rounds behind those in the stream as were used up, and says how many; all: it had run dry."""

    def times(self) -> Sequence[int]:
        """Returns the nanoseconds of each of the batch's kernel calls in an answered round; empty if none was timed.

        One round in many is timed, and returned once.
        """

    def answered(self) -> int:
        """Returns how many calls were answered ever; no call of CUDA."""

    def give_up(self) -> None:
        """Makes what is in the stream write nothing of the client's and go on. Does not wait for the device.

        An answered request stops the stream again, so that this is called again and again until it is empty.
        """

    def idle(self) -> bool:
        """Says whether the stream is empty.

        Raises:
            KernelFailedError: the device has failed.
        """

    def close(self) -> None:
        """Lets go of everything; the stream is empty."""


class _Served:
    """A lane with its rounds.

    Attributes:
        given_up: its rounds were given up and are not armed again yet.
        counted: answers that the metrics have.
    """

    def __init__(self, lane: Lane, rounds: Rounds) -> None:
        self.lane = lane
        self.rounds = rounds
        self.given_up = True
        self.counted = 0

    def give_up(self) -> None:
        self.given_up = True
        self.rounds.give_up()
        self.given_up = True  # they may have been armed in between


class Armed:
    """The armed lanes of a session. Thread-safe."""

    mode = "armed"
    code = selection_pb2.LANE_MODE_ARMED
    reason = "the worker's stream waits for the lane's calls"

    def __init__(
        self,
        open_rounds: Callable[[int, int, Batch], Rounds],
        most: int,
        fallback: Dispatch,
        queue: TurnQueue,
        metrics: ServerMetrics,
        log: Logger,
    ) -> None:
        """Starts no thread yet: the first lane does.

        Args:
            open_rounds: makes rounds for a line, the client's signals and a plan; raises CannotArmError.
            most: lanes that may be armed.
            fallback: serves lanes that cannot be armed any more.
            queue: the worker's turn.
            metrics: where calls and events are counted.
            log: where failures go.
        """
        self._open_rounds = open_rounds
        self._most = most
        self._fallback = fallback
        self._queue = queue
        self._log = log
        self._lock = threading.Lock()  # over what launches
        self._counting = threading.Lock()  # over numbers, and which lanes are served
        self._holds = 0
        self._guarding = False
        self._launching: float | None = None
        self._served: tuple[_Served, ...] = ()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._woken = threading.Event()
        self._metrics = metrics
        self._finished = metrics.lane_calls.labels(self.mode, "finished")

    # ------------------------------------------------------------------------------------------------- as a `Dispatch`

    def take(self, lane: Lane) -> str | None:
        """Arms a lane over one plan, if there may be one more."""
        if len(lane.plans) != 1:
            return "only lanes over one plan are armed"
        if len(self._served) >= self._most:
            return f"{len(self._served)} lanes are armed, as many as may wait in the device's queues at a time"
        batch = lane.plan(1)
        if batch is None:
            return "the plan is gone"
        with self.held():
            try:
                rounds = self._open_rounds(lane.line, lane.signals, batch)
            except CannotArmError as error:
                return str(error)
            with self._counting:
                self._served = (*self._served, _Served(lane, rounds))
        lane.echo(True)
        if not self._threads:
            for name, run in (("topkd-rearm", self._keep_armed), ("topkd-guard", self._guard)):
                self._threads.append(threading.Thread(target=run, name=name, daemon=True))
                self._threads[-1].start()
        self._woken.set()
        return None

    def drop(self, lane: Lane) -> None:
        """Disarms a lane for good."""
        with self.held():
            served = next((one for one in self._served if one.lane is lane), None)
            forgotten = served is not None and self._forget(served)
        if not forgotten:
            self._fallback.drop(lane)

    def close(self) -> None:
        """Disarms every lane for good."""
        self._closed.set()
        self._woken.set()
        with suppress(KernelFailedError):
            self._empty()
        for served in self._served:
            self._forget(served)

    def _forget(self, served: _Served) -> bool:
        """Lets go of a lane's rounds, the lanes being held; says whether no other thread had done so."""
        if not self._take_out(served):
            return False
        self._count(served)
        served.rounds.close()
        return True

    def _take_out(self, served: _Served) -> bool:
        """Serves a lane no more; says whether it was served."""
        with self._counting:
            if served not in self._served:
                return False
            self._served = tuple(one for one in self._served if one is not served)
        served.lane.echo(False)
        return True

    # ------------------------------------------------------------------------------------------------------- holding

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps every lane disarmed meanwhile.

        Raises:
            KernelFailedError: the device has failed, or does not end what it runs.
        """
        with self._counting:
            self._holds += 1
        try:
            self._empty()
            yield
        finally:
            with self._counting:
                self._holds -= 1
            self._woken.set()

    def _empty(self) -> None:
        """Gives up all rounds and waits until the streams are empty; somebody holds the lanes."""
        for served in self._served:
            with suppress(KernelFailedError):
                served.give_up()  # a launch that is held up by rounds has the lock
        with self._lock:
            deadline = time.monotonic() + _IDLE_TIMEOUT_S
            for served in self._served:
                self._metrics.lane_disarmed.inc()
                while not self._idle(served):
                    if time.monotonic() > deadline:
                        raise KernelFailedError("the rounds of a lane do not end")
                    time.sleep(_GIVEN_UP_S)

    def _idle(self, served: _Served) -> bool:
        try:
            served.give_up()
            return served.rounds.idle()
        except KernelFailedError:
            return True  # a device that has failed touches nothing

    def _rearm(self) -> None:
        """Arms what was given up, if nobody holds the lanes."""
        with self._lock:
            for served in self._served:
                if self._holds or self._guarding or self._closed.is_set():
                    return
                if not served.given_up or served.lane.plan(1) is None or not self._idle(served):
                    continue
                served.given_up = False  # whoever gives it up from here on finds it so
                self._launch(served, served.rounds.arm)

    def _give_away(self) -> None:
        """Gives lanes whose plan is gone to the fallback; plans go while lanes are held, so that these are given up."""
        gone = [served for served in self._served if served.given_up and served.lane.plan(1) is None]
        if gone:
            with self.held():  # the driver may not free graphs while a stream of another lane waits
                for served in gone:
                    if self._forget(served):
                        self._fallback.take(served.lane)

    # -------------------------------------------------------------------------------------------------- the two threads

    def _keep_armed(self) -> None:
        last = 0.0
        while not self._closed.is_set():
            self._woken.wait(_REFILL_S[time.monotonic() - last > _BUSY_S] if self._served else _NONE_S)
            self._woken.clear()
            try:
                if any(served.given_up for served in self._served):
                    self._give_away()
                    self._rearm()
                elif self._refill():
                    last = time.monotonic()
            except Exception as error:  # noqa: BLE001  # the thread must outlive a defect: streams wait for it
                self._log.error("armed_lanes_lost", exc_info=error)
                self._lose()

    def _refill(self) -> bool:
        """Refills all lanes; says whether calls came since the last look."""
        came = False
        for served in self._served:
            came = bool(self._count(served)) or came
            with self._lock:
                if self._holds or self._guarding or served.given_up:
                    continue
                if self._launch(served, served.rounds.refill) == served.rounds.most:
                    self._metrics.lane_dry.inc()
                times = served.rounds.times()
            for call, nanoseconds in zip(served.rounds.batch.calls, times, strict=False):
                call.histogram.observe(nanoseconds * 1e-9)
        return came

    def _launch(self, served: _Served, launch: Callable[[], int]) -> int:
        """Calls what launches rounds, and says how many it did; the lock is held."""
        self._launching = time.monotonic()
        try:
            rounds = launch()
        finally:
            self._launching = None
            if self._holds or self._guarding:
                served.give_up()
        self._metrics.lane_rounds.inc(rounds)
        return rounds

    def _count(self, served: _Served) -> int:
        with self._counting:
            came = served.rounds.answered() - served.counted
            served.counted += came
            if came:
                served.lane.count(came)  # a client that watches its time sees that calls come through
        if came:
            batch, metrics = served.rounds.batch, self._metrics
            self._finished.inc(came)
            metrics.rows.inc(came * batch.rows)
            metrics.input_bytes.inc(came * batch.input_bytes)
            metrics.output_bytes.inc(came * batch.output_bytes)
        return came

    def _lose(self) -> None:
        """The device has failed: the fallback tells whoever calls."""
        with self._lock:
            for served in self._served:
                with suppress(Exception):  # whatever is in the stream shall hold nothing up
                    served.give_up()
                self._take_out(served)
                self._fallback.take(served.lane)

    def _guard(self) -> None:
        while not self._closed.wait(_GUARD_S if self._served else _NONE_S):
            if not self._suspicious():
                continue
            self._guarding = True
            self._log.debug("lanes_given_up", message="a turn or a launch takes long; armed rounds may hold it up")
            try:
                while self._suspicious() and not self._closed.is_set():
                    for served in self._served:
                        served.give_up()
                    time.sleep(_GIVEN_UP_S)
            except Exception as error:  # noqa: BLE001  # the thread must outlive a defect: calls are held up otherwise
                self._log.error("armed_lanes_stuck", exc_info=error)
                self._closed.wait(_NONE_S)
            finally:
                self._guarding = False
                self._woken.set()

    def _suspicious(self) -> bool:
        launching = self._launching
        launch = 0.0 if launching is None else time.monotonic() - launching
        return bool(self._served) and max(launch, self._queue.held_for()) > _SUSPICIOUS_S
