"""Plans: a selection whose arguments are fixed once, and which is then called by its number.

A `PlanState` outlives sessions: an attach makes it anew on the server. `Plan` and `AsyncPlan` are its two faces.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from topkd._arena import Stale
from topkd._prepare import prepare_plan
from topkd.errors import ClientClosedError, RegionError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from topkd._core import Core
    from topkd._output import Output
    from topkd._session import Session
    from topkd._types import Selection
    from topkd.errors import TopkdError

__all__ = ["PlanState"]


class PlanState:
    """A plan's arguments and what the current session calls it.

    Attributes:
        selection: The arguments, outputs included: the plan's own where none were given.
        broken: Why it could not be restored, if so.
        closed: Whether it was closed.
        kernel: The kernel family chosen.
        reason: Why.
        output: What becomes of a run's reply.
    """

    def __init__(self, core: Core, selection: Selection) -> None:
        self.selection = dataclasses.replace(selection)
        self.broken: TopkdError | None = None
        self.closed = False
        self.kernel = ""
        self.reason = ""
        self.output: Output
        self._core = core
        self._bound: tuple[Session, int] | None = None

    def bind(self, session: Session, timeout: float) -> None:
        """Creates the plan in a session.

        Raises:
            NeedMemory: The first time, if the arena is to be grown for its outputs first.
            TopkdError: The server or the session refuses it.
        """
        if session.memory_device is None:
            raise RegionError(f"no plans without session memory: {session.no_memory_because}")
        prepared = prepare_plan(session, self._core.arena, self.selection, may_grow=self._bound is None)
        reply = session.call(session.create_plan, prepared.request, timeout)
        self.output = prepared.outputs[0]
        self.selection.out_indices = self.output.indices
        self.selection.out_values = self.output.values
        self.kernel, self.reason, self.broken = reply.kernel, reply.reason, None
        self._bound = (session, reply.plan_id)

    def id_in(self, session: Session) -> int:
        """Returns the plan's id in a session.

        Raises:
            Stale: The session is not the one that it was last made in.
            ClientClosedError: It is closed.
            TopkdError: What kept it from being restored.
        """
        bound = self._bound
        if bound is not None and bound[0] is session and self.broken is None and not self.closed:
            return bound[1]
        if self.closed:
            raise ClientClosedError("the plan is closed")
        raise self.broken or Stale

    def close(self) -> None:
        """Releases the plan in the background. Idempotent."""
        if not self.closed:
            self.closed = True
            self._core.plans.discard(self)
            if self._bound is not None:
                session, plan_id = self._bound
                self._core.reaper.release_plan(session, selection_pb2.ReleasePlanRequest(plan_id=plan_id))

    def __del__(self) -> None:
        self.close()
