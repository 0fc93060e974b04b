"""The memory and the plans of a client: what is registered with every new session.

Everything here blocks; the asynchronous client runs it on threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from topkd._arena import Arena, NeedMemory
from topkd._arrays import HOST
from topkd._reaper import Reaper
from topkd._regions import Record, RegionIndex
from topkd.errors import (
    RegionError,
    ResourceExhaustedError,
    SessionLostError,
    TopkdError,
    UnavailableError,
)

if TYPE_CHECKING:
    from topkd._memory import HostMemory
    from topkd._options import Options
    from topkd._plan import PlanState
    from topkd._session import Session

__all__ = ["Pool"]

_CALL_BOUND: Final = 30.0
"""Seconds that a call which registers or releases something may take."""

_LIMBO: Final = 30.0
"""Seconds within which a worker that has lost its front has surely ended."""


class Pool:
    """Records, plans and the arena.

    Attributes:
        options: The client's.
        session: The live session, None before the first attach and after a loss was noticed.
        arena: Slots of session memory.
        plans: Plans to restore at an attach.
        reaper: Releases regions and plans in the background.
        memory_lock: Guards the records, the plans and the session's index.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.session: Session | None = None
        self.arena = Arena()
        self.plans: weakref.WeakSet[PlanState] = weakref.WeakSet()
        self.reaper = Reaper(self)
        self.memory_lock = threading.RLock()
        self._records: set[Record] = set()
        self._limbo: deque[tuple[float, Any]] = deque()

    def keep_for_a_while(self, prepared: Any) -> None:
        """Keeps the memory of a call whose session was lost: its worker may write to it until it has noticed."""
        now = time.monotonic()
        self._limbo.append((now, prepared))
        while self._limbo and self._limbo[0][0] < now - _LIMBO:
            self._limbo.popleft()

    def restore(self, session: Session) -> None:
        """Registers every record with a new session and makes every plan anew. Called under the lock."""
        ids = {}
        for record in self._records:
            if record.memory.device == session.memory_device:
                with contextlib.suppress(RegionError):  # its owner has unmapped it: calls copy it, plans of it break
                    ids[record] = session.register(record, _CALL_BOUND)
        session.index = RegionIndex(ids)
        if len(ids) < len(self._records):
            self.arena = Arena()  # the server's device is another one: idle slots are of no use to it
        for plan in list(self.plans):
            try:
                plan.bind(session, _CALL_BOUND)
            except UnavailableError:
                raise
            except TopkdError as error:
                plan.broken = error  # raised by its next run; everything else works on

    def forget(self) -> None:
        """Lets go of all memory that no array needs."""
        with self.memory_lock:
            self._records.clear()
            self.arena = Arena()

    def memory_device(self, session: Session) -> int:
        """Returns the device of memory that the session can share.

        Raises:
            RegionError: It can share none.
        """
        if session.memory_device is None:
            raise RegionError(f"no session memory: {session.no_memory_because}")
        return session.memory_device

    def new_record(self, session: Session, nbytes: int) -> Record:
        """Makes memory and shares it with the session."""
        from topkd._memory import HostMemory

        device = self.memory_device(session)
        limit = session.info.limits.max_region_bytes
        if limit and nbytes > limit:
            raise ResourceExhaustedError(f"{nbytes:,} bytes are more than the server's max_region_bytes, {limit:,}")
        memory: HostMemory | Any
        if device == HOST:
            memory = HostMemory(nbytes)
        else:
            from topkd._cuda import CudaMemory

            memory = CudaMemory(nbytes, device)
        return self.share(session, Record(memory))

    def share(self, session: Session, record: Record) -> Record:
        """Registers a record with the session and keeps it for later ones."""
        with self.memory_lock:
            if session is not self.session or session.lost:
                raise SessionLostError("the session was lost while memory was being shared")
            try:
                region_id = session.register(record, _CALL_BOUND)
            except ResourceExhaustedError:
                if not (given_up := self.arena.trim(0)):
                    raise
                for idle in given_up:
                    self.retire(idle)
                region_id = session.register(record, _CALL_BOUND)
            self._records.add(record)
            session.index = session.index.with_record(record, region_id)
        return record

    def grow(self, session: Session, size: int) -> bool:
        """Adds idle slots of a size to the arena. Returns False if no more memory can be shared."""
        with self.memory_lock:
            if self.arena.has_idle(size):  # another call has grown it meanwhile
                return True
            for idle in self.arena.trim():
                self.reaper.retire(idle)
            try:
                record = self.new_record(session, self.arena.chunk_bytes(size, session.info.limits.max_region_bytes))
            except (ResourceExhaustedError, RegionError, MemoryError, OSError):
                return False
            self.arena.add(record, size)
        return True

    def adopt(self, plan: PlanState, session: Session) -> None:
        """Makes a new plan in the session and keeps it for later ones."""
        while True:
            try:
                with self.memory_lock:
                    if session is not self.session or session.lost:
                        raise SessionLostError("the session was lost while a plan was being made")
                    plan.bind(session, self.options.timeout)
                    self.plans.add(plan)
                    return
            except NeedMemory as need:
                if not self.grow(session, need.size):
                    raise ResourceExhaustedError("no session memory is left for the plan's outputs") from None

    def holder_of(self, address: int, nbytes: int) -> Record | None:
        """Returns the record that holds some bytes."""
        with self.memory_lock:
            for record in self._records:
                memory = record.memory
                if memory.address <= address and address + nbytes <= memory.address + memory.size:
                    return record
        return None

    def retire(self, record: Record) -> None:
        """Takes a record out of use and releases its region; returns when the server has acknowledged it or is gone."""
        with self.memory_lock:
            self._records.discard(record)
            session = self.session
            region_id = session.index.ids.get(record) if session else None
            if session is None or region_id is None:
                return
            session.index = session.index.without(record)
        if session.lost:
            return
        try:
            session.release(region_id, _CALL_BOUND)
        except UnavailableError:
            return
        except TopkdError:
            session.unreleased.append(record)  # the server may hold it still: it stays until the session ends

    def let_go(self, record: Record) -> None:
        """Ends one hold of a registered allocation, and with the last one its registration."""
        with self.memory_lock:
            record.holders -= 1
            if record.holders or record.own:
                return
        self.retire(record)
