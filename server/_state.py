"""Sessions as a worker holds them: regions, plans, and batches that were prepared before."""

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from topkd._words import Words
from topkd.kernels import SelectRequest

from ._execute import Batch
from ._lanes import Lanes
from ._memory import Region
from ._queue import Account
from ._timeline import Timeline
from ._tokens import digest
from .config import ServerLimits
from .errors import (
    DeadlinePassedError,
    FieldError,
    KernelFailedError,
    PlanLimitError,
    PlanNotFoundError,
    RegionLimitError,
    RegionNotFoundError,
)
from .metrics import ServerMetrics

__all__ = ["Plan", "Session", "SessionTable"]

_KEPT_BATCHES = 256
_LANES_END_S = 0.5
LONGEST_KEPT_MESSAGE = 16 << 10


@dataclass(slots=True)
class Plan:
    """A selection that was validated once.

    Attributes:
        regions: those that it lies in.
        batch: what lanes run; None before the first lane over it.
    """

    request: SelectRequest
    kernel: str
    reason: str
    regions: frozenset[int]
    batch: Batch | None = None


class Session:
    """One session's things. Its lock guards the tables; what runs has the worker's turn besides.

    Attributes:
        id: name in logs.
        account: its place in the queue.
        remote: attached over TCP, so that its tensors are inline.
        words: the page that orders its calls; None over TCP.
        timeline: its ordered calls; None without words.
        lanes: None before the first is opened.
        handlers: gRPC's, bound to the session, by method.
    """

    def __init__(self, session_id: str, limits: ServerLimits, metrics: ServerMetrics, remote: bool) -> None:
        self.id = session_id
        self.account = Account(limits.max_queue)
        self.remote = remote
        self.regions: dict[int, Region] = {}
        self.plans: dict[int, Plan] = {}
        self.batches: OrderedDict[bytes, Batch] = OrderedDict()
        self._limits = limits
        self._metrics = metrics
        self._lock = threading.Lock()
        self.words: Words | None = None
        self.timeline: Timeline | None = None
        self.lanes: Lanes | None = None
        self.handlers: dict[str, Any] = {}
        self._unsettled: list[Region] = []
        self._streams = 0

    def add_region(self, size: int, open_region: Callable[[], Region], field: str) -> int:
        """Opens a region within the limits and returns its id.

        Raises:
            RegionLimitError: there are as many regions, or bytes of them, as may be.
            FieldError: the region is larger than any may be.
        """
        if size > self._limits.max_region_bytes:
            raise FieldError(f"size is {size}; at most {self._limits.max_region_bytes} (max_region_bytes)", field=field)
        with self._lock:
            mapped = [*self.regions.values(), *self._unsettled]
            if len(mapped) >= self._limits.max_regions:
                raise RegionLimitError(f"the session has {len(mapped)} regions, as many as may be (max_regions)")
            if sum(region.size for region in mapped) + size > self._limits.max_session_bytes:
                raise RegionLimitError(
                    f"regions of at most {self._limits.max_session_bytes} bytes (max_session_bytes) may be mapped"
                )
            region = open_region()
            region_id = _new_id(self.regions)
            self.regions[region_id] = region
            self._count(region, 1)
        return region_id

    def take_region(self, region_id: int) -> Region:
        """Takes a region out of the session, with plans and prepared batches over it; `close_region` must follow."""
        with self._lock:
            region = self.regions.pop(region_id, None)
            if region is None:
                raise RegionNotFoundError(region_id)
            for plan_id in [key for key, plan in self.plans.items() if region_id in plan.regions]:
                del self.plans[plan_id]
                self._metrics.plans.dec()
            self.batches.clear()
            self._unsettled.append(region)
        return region

    def lane_batch(self, plan_id: int) -> Batch | None:
        """Returns what a lane runs for a plan, None if the plan is gone; in the turn."""
        plan = self.plans.get(plan_id)
        return None if plan is None else plan.batch

    def settle(self, timeout: float) -> bool:
        """Waits until no ordered call and no call of a lane that was taken so far is under way; says if that came."""
        deadline = time.monotonic() + timeout
        if self.timeline is not None and not self.timeline.settle(timeout):
            return False
        return self.lanes is None or self.lanes.settle(max(0.0, deadline - time.monotonic()))

    def flush(self) -> None:
        """Notes the figures of calls that are over."""
        for calls in (self.timeline, self.lanes):
            if calls is not None:
                calls.flush()

    def lanes_held(self) -> AbstractContextManager[None]:
        """Lets the caller do what the driver does not do while a stream of the process waits for a lane's call."""
        return nullcontext() if self.lanes is None else self.lanes.held()

    def open_stream(self, most: int) -> bool:
        """Counts a stream that opens; False if as many are open as may be."""
        with self._lock:
            if self._streams >= most:
                return False
            self._streams += 1
            return True

    def close_stream(self) -> None:
        """Counts a stream that ends."""
        with self._lock:
            self._streams -= 1

    def close_region(self, region: Region, timeout: float) -> None:
        """Closes a region that was taken, once no call without a turn can touch it any more; not in the turn.

        Raises:
            DeadlinePassedError: such calls do not end in time; the region is closed when they have ended, and counts
                among the session's until then.
        """
        if not self.settle(timeout):
            threading.Thread(target=self._close_late, args=(region,), name="topkd-unmap", daemon=True).start()
            raise DeadlinePassedError("calls that were accepted before are not over; the region stays mapped till then")
        self._close(region)

    def _close_late(self, region: Region) -> None:
        """Closes a region once what may touch it is over, however long that takes."""
        self.settle(threading.TIMEOUT_MAX)
        with suppress(KernelFailedError):  # of lanes that do not end: the region is closed with the session
            self._close(region)

    def _close(self, region: Region) -> None:
        """Closes a region that was taken, unless the session's end has."""
        with self.lanes_held():
            with self._lock:
                if region not in self._unsettled:
                    return
                self._unsettled.remove(region)
                self._count(region, -1)
            region.close()

    def _count(self, region: Region, sign: int) -> None:
        self._metrics.regions.labels(region.kind).inc(sign)
        self._metrics.region_bytes.labels(region.kind).inc(sign * region.size)

    def add_plan(self, plan: Plan) -> int:
        """Keeps a plan and returns its id."""
        with self._lock:
            if len(self.plans) >= self._limits.max_plans:
                raise PlanLimitError(f"the session has {len(self.plans)} plans, as many as may be (max_plans)")
            plan_id = _new_id(self.plans)
            self.plans[plan_id] = plan
            self._metrics.plans.inc()
        return plan_id

    def drop_plan(self, plan_id: int) -> None:
        """Forgets a plan."""
        with self._lock:
            if self.plans.pop(plan_id, None) is None:
                raise PlanNotFoundError(plan_id)
            self.batches.clear()
            self._metrics.plans.dec()

    def keep_batch(self, message: bytes, batch: Batch) -> None:
        """Keeps a prepared batch for the next request of the same bytes; the caller has the turn."""
        if len(message) <= LONGEST_KEPT_MESSAGE:
            self.batches[message] = batch
            if len(self.batches) > _KEPT_BATCHES:
                self.batches.popitem(last=False)

    def close(self) -> None:
        """Ends its ordered calls and closes every region. Nothing else of it may run. Closing twice does nothing."""
        if self.lanes is not None:
            self.lanes.close_all(_LANES_END_S)
        if self.timeline is not None:
            self.timeline.close()
        with self._lock:
            self.batches.clear()
            self._metrics.plans.dec(len(self.plans))
            self.plans.clear()
            regions, self.regions = list(self.regions.values()), {}
            regions += self._unsettled
            self._unsettled = []
            for region in regions:
                self._count(region, -1)
        for region in regions:
            region.close()


class SessionTable:
    """The sessions of one worker, by token."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, Session] = {}
        self._by_id: dict[str, tuple[bytes, Session]] = {}
        self._last: tuple[str, Session] | None = None

    def add(self, token: str, session: Session) -> None:
        """Makes a token valid."""
        key = digest(token)
        self._by_id[session.id] = (key, session)
        self._by_token[key] = session

    def find(self, token: str | None) -> Session | None:
        """Returns the session of a token, or None.

        The token of the last call is compared in constant time instead of hashed: 1 us instead of 8.
        """
        if token is None or not token.isascii():
            return None
        last = self._last
        if last is not None and hmac.compare_digest(last[0], token):
            return last[1]
        session = self._by_token.get(digest(token))
        if session is not None:
            self._last = (token, session)
            if session.id not in self._by_id:  # removed meanwhile
                self._last = None
        return session

    def remove(self, session_id: str) -> Session | None:
        """Makes the session's token invalid and returns the session."""
        key, session = self._by_id.pop(session_id, (b"", None))
        self._by_token.pop(key, None)
        self._last = None
        return session

    def all(self) -> list[Session]:
        """Returns the sessions."""
        return [session for _, session in list(self._by_id.values())]


def _new_id(taken: object) -> int:
    """Returns 64 random bits that are not 0; ids are never guessed and never reused."""
    while True:
        number = secrets.randbits(64)
        if number and number not in taken:  # type: ignore[operator]  # a mapping
            return number
