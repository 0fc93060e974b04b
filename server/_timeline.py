"""Ordered calls of one session: accepted, run when their ready word has come, given up when it does not come.

Two ways, in order within a slot. Where the backend can, a call is *enqueued* at once behind its ready word, in the
slot's own stream, and nothing on the CPU has a part in it any more but its time-out. Else it *waits* here: a thread
watches the ready words of the calls at the head of each slot and runs them in the worker's turn. Calls behind a waiting
one wait too.

While a stream waits, the driver holds up other calls of this process (first launches, frees) until it goes on. So that
it does go on, the thread that sees to the time-outs of enqueued calls only loads and stores words, and nobody calls the
backend with the lock that it takes.

The words are the client's to scribble on; what protects memory (`settle`, `close`) never trusts them.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from topkd._words import CLIENT_BELL, LONGEST_TIMELINE, POISON, WORKER_BELL, Failure, Words
from topkd.v1 import selection_pb2

from ._execute import Batch
from ._logging import Logger
from ._queue import Account, TurnQueue
from ._slots import OrderedCall, Slot
from .config import ServerLimits
from .errors import DeadlinePassedError, FieldError, KernelFailedError, QueueFullError, WorkerLostError
from .metrics import ServerMetrics

__all__ = ["Timeline"]

DEFAULT_READY_TIMEOUT_S = 1.0
_IDLE_S = 0.5
"""Between looks while nothing is due; a ring of the client's bell or an accepted call ends it."""
_WATCH_S = (50e-6, 500e-6)
"""Between looks at ready words that a GPU may write, which rings no bell: in the first milliseconds, and later."""
_WATCH_CLOSELY_S = 2e-3
_TURN_S = 0.1
"""How long the watching thread waits for the turn before it looks at its time-outs again."""
_STEP_S = 0.02
"""Between looks while something is under way whose end nobody announces."""
_CLOSE_S = 0.5
_RETRY_AFTER_MS = 20


class _Track:
    """A slot and what was accepted on it.

    Attributes:
        number: of the slot.
        ready, done: of the last call.
        waiting: for their ready words, or for those before them.
        entering: the call that a handler is putting into the stream now, if any.
        running: the call that the watching thread runs now, if any.
        enqueued: in the stream as far as is known.
        head: the call whose ready word is awaited, and `since` when: the caller's stream comes to a call only after the
            one before it is over, so that its time-out counts from there.
    """

    def __init__(self, number: int, slot: Slot) -> None:
        self.number = number
        self.slot = slot
        self.ready = 0
        self.done = 0
        self.waiting: deque[OrderedCall] = deque()
        self.entering: OrderedCall | None = None
        self.running: OrderedCall | None = None
        self.enqueued: list[OrderedCall] = []
        self.failures = 0
        self.head: OrderedCall | None = None
        self.since = 0.0

    def late(self, call: OrderedCall) -> float:
        """Returns by how many seconds a call that all others have left behind is late; negative if it is not."""
        now = time.monotonic()
        if self.head is not call:
            self.head, self.since = call, now
        return now - max(self.since, call.accepted) - call.timeout

    @property
    def in_stream(self) -> list[OrderedCall]:
        """What a ready word that does not come would hold up."""
        return [*self.enqueued, *([self.entering] if self.entering else [])]

    @property
    def unfinished(self) -> list[OrderedCall]:
        """Everything that was accepted and is not over as far as is known."""
        return [*self.in_stream, *self.waiting, *([self.running] if self.running else [])]


class Timeline:
    """The slots of one session. Thread-safe."""

    def __init__(
        self,
        words: Words,
        open_slots: Callable[[Words, int], Sequence[Slot]],
        queue: TurnQueue,
        limits: ServerLimits,
        metrics: ServerMetrics,
        log: Logger,
    ) -> None:
        """Makes no slot yet: the first call does.

        Args:
            words: the session's.
            open_slots: makes the backend's slots.
            queue: the worker's turn.
            limits: bounds.
            metrics: where outcomes are counted.
            log: where failures go.
        """
        self._words = words
        self._open_slots = open_slots
        self._queue = queue
        self._limits = limits
        self._log = log
        self._account = Account(1 << 30)  # what waits here was admitted already
        self._lock = threading.RLock()
        self._tracks: list[_Track] = []
        self._closed = False
        self._entered = threading.Event()
        self._finished = metrics.ordered.labels("finished")
        self._timed_out = metrics.ordered.labels("ready_timeout")
        self._failed = metrics.ordered.labels("kernel_failed")

    # ------------------------------------------------------------------------------------------------ what handlers do

    def accept(self, ordering: selection_pb2.Ordering, batch: Batch, waited: int) -> None:
        """Takes a call; the caller has the turn, and `refuse` must follow if this raises.

        Raises:
            FieldError: the ordering is wrong.
            QueueFullError: as many calls of the session as may are under way.
            Exception: the launch failed.
        """
        with self._lock:
            track = self._check(ordering)
            if sum(len(one.unfinished) for one in self._tracks) >= self._limits.max_queue:
                text = "as many ordered calls of the session as may (max_queue) are under way"
                raise QueueFullError(text, retry_after_ms=_RETRY_AFTER_MS)
            timeout = ordering.ready_timeout_ms / 1000 or DEFAULT_READY_TIMEOUT_S
            call = OrderedCall(ordering.ready, ordering.done, timeout, batch, waited)
            track.ready, track.done = ordering.ready, ordering.done
            if track.waiting or track.running is not None:
                track.waiting.append(call)
            else:
                track.entering = call
        self._entered.set()
        if track.entering is call:
            self._enqueue(track, call)
        self._words.ring(CLIENT_BELL)

    def _enqueue(self, track: _Track, call: OrderedCall) -> None:
        """Puts a call into the stream, or where it waits. Without the lock: a launch can block until a time-out."""
        try:
            enqueued = track.slot.enqueue(call)
        except Exception:
            track.slot.skip(call.done)  # the reply says why
            with self._lock:
                track.entering = None
            raise
        with self._lock:
            track.entering = None
            if enqueued:
                track.enqueued.append(call)
            else:
                track.waiting.appendleft(call)  # before what was refused meanwhile

    def refuse(self, ordering: selection_pb2.Ordering) -> None:
        """Sees to the done word of a call that was refused, so that no stream waits for it for ever."""
        with self._lock, contextlib.suppress(FieldError, WorkerLostError):
            track = self._check(ordering)
            track.ready, track.done = ordering.ready, ordering.done
            track.waiting.append(OrderedCall(ordering.ready, ordering.done, 0.0, None))
        self._words.ring(CLIENT_BELL)

    def _check(self, ordering: selection_pb2.Ordering) -> _Track:
        if self._closed:
            raise WorkerLostError("the session has ended")
        if not self._tracks:
            slots = self._open_slots(self._words, self._limits.max_slots)
            self._tracks = [_Track(number, slot) for number, slot in enumerate(slots)]
            threading.Thread(target=self._watch, name="topkd-ordered", daemon=True).start()
            threading.Thread(target=self._watch_late, name="topkd-late", daemon=True).start()
        if ordering.slot >= len(self._tracks):
            text = f"slot is {ordering.slot}; 0 .. {len(self._tracks) - 1} are allowed (max_slots)"
            raise FieldError(text, field="ordering.slot")
        track = self._tracks[ordering.slot]
        if not track.ready <= ordering.ready < LONGEST_TIMELINE:
            text = f"ready is {ordering.ready}; {track.ready} .. 2^62 - 1 are allowed: a slot's values never go down"
            raise FieldError(text, field="ordering.ready")
        if not track.done < ordering.done < LONGEST_TIMELINE:
            text = (
                f"done is {ordering.done}; {track.done + 1} .. 2^62 - 1 are allowed: each call of a slot has a new one"
            )
            raise FieldError(text, field="ordering.done")
        if ordering.ready_timeout_ms > self._limits.max_ready_timeout_ms:
            text = f"ready_timeout_ms is {ordering.ready_timeout_ms}; at most {self._limits.max_ready_timeout_ms}"
            raise FieldError(f"{text} (max_ready_timeout_ms) is allowed", field="ordering.ready_timeout_ms")
        return track

    def settle(self, timeout: float) -> bool:
        """Waits until every call accepted so far is over and the device has let go of it; says whether that came."""
        deadline = time.monotonic() + timeout
        with self._lock:
            last = [(track, track.done) for track in self._tracks]
        while True:
            try:
                for track, _ in last:
                    self._reap(track)
            except KernelFailedError:
                return True  # a device that has failed touches nothing
            with self._lock:
                last = [(track, done) for track, done in last if any(call.done <= done for call in track.unfinished)]
            if not last:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    def flush(self) -> None:
        """Notes the figures of calls that are over."""
        with contextlib.suppress(KernelFailedError):
            for track in self._tracks:
                self._reap(track)

    def _reap(self, track: _Track) -> None:
        """Lets go of the calls in a stream that are over."""
        before = list(track.enqueued)
        unfinished = set(map(id, track.slot.unfinished()))
        with self._lock:
            over = [call for call in before if id(call) not in unfinished and call in track.enqueued]
            for call in over:
                track.enqueued.remove(call)
        self._finished.inc(sum(not call.given_up for call in over))

    def close(self) -> None:
        """Ends everything: nothing that was accepted runs any more, and nobody waits for it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for track in self._tracks:
                for call in track.in_stream:
                    call.given_up = True
                    track.slot.give_up(call)
                if track.unfinished:
                    self._note(track, track.done, selection_pb2.ORDERED_FAILURE_SESSION_ENDED)
                track.waiting.clear()
                self._words.set_ready(track.number, POISON)
        self._words.ring(CLIENT_BELL)
        self._entered.set()
        self.settle(_CLOSE_S)
        for slot in range(self._limits.max_slots):
            self._words.set_done(slot, POISON)
        self._words.ring(WORKER_BELL)

    # -------------------------------------------------------------------------------------------- the watching threads

    def _watch_late(self) -> None:
        while not self._closed:
            self._entered.clear()
            with self._lock:
                pause = min((self._give_up_late(track) for track in self._tracks), default=_IDLE_S)
            self._entered.wait(pause)

    def _give_up_late(self, track: _Track) -> float:
        """Gives up enqueued calls whose ready word did not come in time, and keeps at it until the stream moves on.

        Returns:
            Seconds until there is something to do, unless another call enters the stream.
        """
        for call in track.in_stream:
            if self._words.done(track.number) >= call.done:
                continue  # it is over
            come = self._words.ready(track.number) >= call.ready
            if not call.given_up:
                late = 0.0 if come else track.late(call)
                if come or late < 0:
                    return _STEP_S if come else -late  # those behind it cannot have their ready words either
                call.given_up = True
                self._note(track, call.done, selection_pb2.ORDERED_FAILURE_READY_TIMEOUT)
                self._timed_out.inc()
            if not come:
                track.slot.give_up(call)
            return _STEP_S
        return _IDLE_S

    def _watch(self) -> None:
        closely_until = 0.0
        while not self._closed:
            seen = self._words.bell(CLIENT_BELL)
            pause = _IDLE_S
            polls = False
            for track in self._tracks:
                try:
                    self._reap(track)
                    self._advance(track)
                except KernelFailedError as error:
                    self._lose_device(error)
                    return
                except Exception as error:  # noqa: BLE001  # the thread must outlive a defect: streams wait for it
                    self._log.error("ordered_calls_stumbled", exc_info=error)
                    pause = min(pause, _STEP_S)
                with self._lock:
                    pause = min(pause, self._pause(track))
                    polls = polls or (bool(track.waiting) and not track.slot.rung)
            now = time.monotonic()
            closely_until = (closely_until or now + _WATCH_CLOSELY_S) if polls else 0.0
            if polls:
                pause = min(pause, _WATCH_S[now > closely_until])
            self._words.wait(CLIENT_BELL, seen, max(pause, _WATCH_S[0]))

    def _pause(self, track: _Track) -> float:
        """Returns how long nothing of a slot is due; the lock is held."""
        return _STEP_S if track.waiting else _IDLE_S

    def _advance(self, track: _Track) -> None:
        """Runs, or fails, what waits at the head of a slot, as far as it can be."""
        while True:
            with self._lock:
                call = track.waiting[0] if track.waiting else None
                if call is None or track.entering is not None or self._closed:
                    return
                come = self._words.ready(track.number) >= call.ready
                if call.batch is not None and not come and (track.in_stream or track.late(call) < 0):
                    return
                if call.batch is None or not come:
                    track.running = track.waiting.popleft()
            if track.running is not None:
                self._end_without(track, call)
                continue
            try:
                self._queue.enter(self._account, _TURN_S)
            except DeadlinePassedError:
                return  # other slots must not wait for the turn
            try:
                self._run(track, call)
            finally:
                self._queue.leave(self._account)

    def _end_without(self, track: _Track, call: OrderedCall) -> None:
        """Ends a call that was refused (its reply has said why) or whose ready word did not come."""
        try:
            if call.batch is not None:
                self._timed_out.inc()
                self._fail(track, call, selection_pb2.ORDERED_FAILURE_READY_TIMEOUT)
            else:
                track.slot.skip(call.done)
        finally:
            with self._lock:
                track.running = None

    def _run(self, track: _Track, call: OrderedCall) -> None:
        """Runs the call at the head of a slot; the caller has the turn."""
        with self._lock:
            if self._closed:
                return
            track.running = track.waiting.popleft()
        try:
            track.slot.run(call)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
            self._log.error("ordered_call_failed", exc_info=error)
            self._failed.inc()
            self._fail(track, call, selection_pb2.ORDERED_FAILURE_KERNEL_FAILED)
        else:
            with self._lock:
                track.enqueued.append(call)
            self._reap(track)
        finally:
            with self._lock:
                track.running = None

    def _fail(self, track: _Track, call: OrderedCall, code: int) -> None:
        """Ends a call of which nothing runs."""
        with self._lock:
            self._note(track, call.done, code)
        track.slot.skip(call.done)

    def _note(self, track: _Track, done: int, code: int) -> None:
        """Stores a failure; the lock is held. Its call's done word comes afterwards."""
        before = self._words.failure(track.number)
        first = before.first if before.total and before.last + 1 == done and before.code == code else done
        track.failures += 1
        self._words.set_failure(track.number, Failure(first, done, code, track.failures))

    def _lose_device(self, error: Exception) -> None:
        """The device has failed: nothing that was enqueued will end, and no stream shall wait for it."""
        self._log.error("ordered_calls_lost", exc_info=error)
        with self._lock:
            self._closed = True
            for track in self._tracks:
                self._note(track, track.done, selection_pb2.ORDERED_FAILURE_KERNEL_FAILED)
                self._words.set_done(track.number, POISON)
        self._words.ring(WORKER_BELL)
