"""The worker's gRPC side: SelectionService, behind the token check."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from topkd import kernels
from topkd._words import FIRST_LANE, Words
from topkd.v1 import selection_pb2

from ._decode import Decoder
from ._direct import DirectPool
from ._execute import Batch, Executor, Request
from ._lanes import Lanes
from ._lanes_polled import Polled
from ._logging import Logger
from ._memory import Backend, Signals
from ._queue import TurnQueue
from ._record import Recorder
from ._slots import Slot
from ._state import Plan, Session, SessionTable
from ._stream_rpc import Streams
from ._timeline import Timeline
from ._tokens import TOKEN_KEY, metadata_value, request_id
from ._wire import join_results
from .config import ServerLimits
from .errors import (
    CallCancelledError,
    DeadlinePassedError,
    DeviceMismatchError,
    DrainingError,
    FieldError,
    PlanNotFoundError,
    ServerError,
    TokenInvalidError,
    outcome_of,
    to_status,
)
from .metrics import ServerMetrics

__all__ = ["SelectionService", "TokenInterceptor", "make_server"]

SERVICE = "topkd.v1.SelectionService"
_STREAM_METHOD = f"/{SERVICE}/SelectTopKStream"
_NS = 1e-9
_FILLS_KEPT = 60
"""Readings of the queue's fill that a flush looks at: four a second for 15 s, a usual scrape interval."""
_REFUSING_THREADS = 8
_LANES_SWITCH_S = 0.5e-3
"""That a thread keeps the interpreter from others once there are lanes: with Python's 5 ms armed ones run dry behind
whoever is busy. Not before, because whoever waits for the interpreter sets a timer, and short ones cost a call 4 %."""
_LONGEST_SETTLE_S = 20.0
"""That a release waits for ordered calls; each ends within its time-outs."""
Context = Any  # grpc.ServicerContext, whose stubs lack what is used here


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses calls without a valid token before any handler sees them."""

    def __init__(self, sessions: SessionTable, metrics: ServerMetrics) -> None:
        self._sessions = sessions
        self._refused = metrics.requests.labels("unauthenticated", "UNAUTHENTICATED")
        self._handler: Any = grpc.unary_unary_rpc_method_handler(self._refuse)
        self._stream_handler: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Passes calls of open sessions on."""
        session = self._sessions.find(metadata_value(details.invocation_metadata, TOKEN_KEY))
        streams = details.method == _STREAM_METHOD
        if session is None:
            return self._stream_handler if streams else self._handler
        bound = session.handlers.get(details.method)
        if bound is None and (handler := continuation(details)) is not None:
            if streams:
                bound = grpc.stream_stream_rpc_method_handler(partial(handler.stream_stream, session))
            else:
                behavior = partial(handler.unary_unary, session)
                if hasattr(handler.unary_unary, "direct"):
                    behavior.direct = partial(handler.unary_unary.direct, session)  # type: ignore[attr-defined]
                bound = grpc.unary_unary_rpc_method_handler(behavior)
            session.handlers[details.method] = bound
        return bound

    def _refuse(self, _: object, context: Context) -> bytes:
        self._refused.inc()
        context.abort_with_status(rpc_status.to_status(to_status(TokenInvalidError())))
        return b""


class SelectionService:
    """The methods; requests and replies are bytes here, so that a request that was seen before needs no parsing.

    Attributes:
        draining: no new work is taken.
    """

    def __init__(self, backend: Backend, limits: ServerLimits, metrics: ServerMetrics, log: Logger) -> None:
        self.draining = False
        self.queue = TurnQueue()
        self._backend = backend
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._executor = Executor(backend, metrics, limits.max_message_bytes - (64 << 10), log)
        self._recorder = Recorder(metrics)
        self._fills: deque[float] = deque(maxlen=_FILLS_KEPT)
        self._streams = Streams(self, limits, metrics, self._recorder)

    def start_figures(self) -> None:
        """Says that the worker is ready: what is compiled from now on came too late."""
        self._recorder.start()

    def flush_figures(self) -> None:
        """Puts what was noted of calls into the metrics."""
        self._recorder.flush()
        self._metrics.queued.set(self.queue.depth)
        self._fills.append(self.queue.fullest())
        self._metrics.queue_fill.set(max(self._fills))

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the handler to register."""
        methods = {
            "SelectTopK": self.select,
            "MergeTopK": self.merge,
            "CreatePlan": self.create_plan,
            "ReleasePlan": self.release_plan,
            "OpenLane": self.open_lane,
            "CloseLane": self.close_lane,
            "RegisterRegion": self.register_region,
            "ReleaseRegion": self.release_region,
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._answer(name, method)) for name, method in methods.items()
        }
        direct = self._answer("SelectTopK", partial(self.select, entered=True), admitted=True)
        handlers["SelectTopK"].unary_unary.direct = lambda session, message: (
            partial(direct, session) if self.take_turn(session, message) else None
        )
        handlers["SelectTopKStream"] = grpc.stream_stream_rpc_method_handler(self._streams.serve)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answer(
        self, method: str, run: Callable[[Session, bytes, Context], bytes], admitted: bool = False
    ) -> Callable[[Session, bytes, Context], bytes]:
        """Wraps a method: counts, times, and turns exceptions into statuses. The interceptor has found the session."""
        seconds: Histogram = self._metrics.request_seconds.labels(method)
        succeeded: Counter = self._metrics.requests.labels(method, "OK")
        note, clock = self._recorder.request, time.perf_counter_ns

        def answer(session: Session, message: bytes, context: Context) -> bytes:
            started = clock()
            try:
                if not admitted:
                    self.refuse_if_draining()
                reply = run(session, message, context)
            except Exception as error:  # noqa: BLE001  # every one is answered with a status
                seconds.observe((clock() - started) * _NS)
                self.fail(method, error, context, session)
            note(seconds, succeeded, clock() - started)
            return reply

        return answer

    def refuse_if_draining(self) -> None:
        """Raises DrainingError if no new work is taken."""
        if self.draining:
            raise DrainingError

    def fail(self, method: str, error: Exception, context: Context, session: Session) -> None:
        """Logs, counts and answers an exception; does not return."""
        identity = self.note_failure(method, error, context, session)
        context.abort_with_status(rpc_status.to_status(to_status(error, identity)))

    def note_failure(self, method: str, error: Exception, context: Context, session: Session) -> str:
        """Logs and counts an exception; returns the request's id."""
        identity, outcome = request_id(context.invocation_metadata()), outcome_of(error)
        self._metrics.requests.labels(method, outcome.name).inc()
        log = self._log.bind(request_id=identity, method=method, code=outcome.name, reason=outcome.reason)
        log = log.bind(session=session.id)
        if isinstance(error, ServerError):
            log.debug("request_refused", message=str(error)[:300])
        else:
            log.error("request_failed", exc_info=error)
        return identity

    def take_turn(self, session: Session, message: bytes) -> bool:
        """Takes the turn for a SelectTopK that is over soon, if nobody has it; `select` must follow, `entered`.

        Not where there are lanes, whose streams may hold up the driver.
        """
        batch = session.batches.get(message)
        soon = batch is not None and batch.quick and session.lanes is None and not self.draining
        return soon and self.queue.take(session.account)

    def _enter(self, session: Session, context: Context, entered: bool = False) -> None:
        """Waits for the turn, unless it was taken before; the caller is still there when it has it."""
        remaining = context.time_remaining()
        if not entered:
            self.queue.enter(session.account, remaining, context.add_callback)
        if _waited_for(context):
            self._backend.enter_thread()
            return
        self.queue.leave(session.account)
        if remaining is not None and context.time_remaining() <= 0:
            raise DeadlinePassedError("the deadline passed before the request ran; it was not run")
        raise CallCancelledError("cancelled before the request ran; it was not run")

    def select(self, session: Session, message: bytes, context: Context, *, entered: bool = False) -> bytes:
        """SelectTopK, and a request of SelectTopKStream; `entered` after `take_turn`."""
        if not entered and message not in session.batches:
            request = _parse(selection_pb2.SelectTopKRequest, message)
            if request.HasField("ordering"):
                return self._select_ordered(session, request, context)
        return self._run(session, message, context, self._prepare_select, entered)

    def _select_ordered(self, session: Session, request: selection_pb2.SelectTopKRequest, context: Context) -> bytes:
        """Accepts an ordered SelectTopK."""
        arrived = time.perf_counter_ns()
        ordering = selection_pb2.Ordering()
        ordering.CopyFrom(request.ordering)
        request.ClearField("ordering")
        timeline = session.timeline
        if timeline is None:
            raise FieldError("sessions over TCP have no words that could order calls", field="ordering")
        try:
            self._enter(session, context)
            try:
                waited = time.perf_counter_ns() - arrived
                batch = self._prepare_select(session, request.SerializeToString(), request)
                if batch.inline or batch.copied:
                    raise FieldError("every tensor of an ordered call lies in a region", field="ordering")
                if not batch.warm:
                    with session.lanes_held():
                        self._executor.warm(batch)
                timeline.accept(ordering, batch, waited)
            finally:
                self.queue.leave(session.account)
        except Exception:
            timeline.refuse(ordering)
            raise
        return join_results(self._executor.accepted(batch), waited)

    def open_timeline(self, words: Words) -> Timeline:
        """Makes the timeline of a session."""

        def open_slots(words: Words, count: int) -> Sequence[Slot]:
            return self._backend.open_slots(words, range(count), self._executor, self._recorder)

        return Timeline(words, open_slots, self.queue, self._limits, self._metrics, self._log)

    def merge(self, session: Session, message: bytes, context: Context) -> bytes:
        """MergeTopK."""
        return self._run(session, message, context, self._prepare_merge)

    def _run(
        self,
        session: Session,
        message: bytes,
        context: Context,
        prepare: Callable[[Session, bytes], Batch],
        entered: bool = False,
    ) -> bytes:
        arrived = time.perf_counter_ns()
        self._enter(session, context, entered)
        try:
            queued = time.perf_counter_ns() - arrived
            batch = prepare(session, message)
            with nullcontext() if session.lanes is None or self._executor.has_run(batch) else session.lanes_held():
                results, times, waited = self._executor.run(batch, lanes=session.lanes is not None)
            self._capture(session, batch)
        finally:
            self.queue.leave(session.account)
        self._recorder.batch(queued, batch, times, waited)
        return join_results(results, queued)

    def _capture(self, session: Session, batch: Batch) -> None:
        """Has a batch that comes again replayed as a whole, at a moment at which no stream waits for a word."""
        if self._executor.comes_again(batch) and session.settle(0.0):
            with session.lanes_held():
                self._executor.capture(batch)

    def _prepare_select(
        self, session: Session, message: bytes, request: selection_pb2.SelectTopKRequest | None = None
    ) -> Batch:
        known = session.batches.get(message)
        if known is not None:
            return known
        if request is None:
            request = _parse(selection_pb2.SelectTopKRequest, message)
        self._check_batch(len(request.items))
        decoder = Decoder(self._backend, session.regions, self._limits)
        requests: list[Request] = []
        paths: list[str] = []
        for place, item in enumerate(request.items):
            kind = item.WhichOneof("item")
            if kind == "selection":
                paths.append(f"items[{place}].selection.")
                requests.append(decoder.selection(item.selection, paths[-1]))
            elif kind == "plan":
                paths.append(f"items[{place}].plan.")
                requests.append(_plan(session, item.plan.plan_id, f"{paths[-1]}plan_id").request)
            else:
                raise FieldError("an item is empty: neither selection nor plan", field=f"items[{place}]")
        batch = self._executor.prepare(requests, paths)
        batch.copied = decoder.inline
        if not decoder.inline:
            session.keep_batch(message, batch)
        return batch

    def _prepare_merge(self, session: Session, message: bytes) -> Batch:
        request = _parse(selection_pb2.MergeTopKRequest, message)
        self._check_batch(len(request.items))
        decoder = Decoder(self._backend, session.regions, self._limits)
        paths = [f"items[{place}]." for place in range(len(request.items))]
        requests = [decoder.merge(item, path) for item, path in zip(request.items, paths, strict=True)]
        return self._executor.prepare(requests, paths)

    def _check_batch(self, count: int) -> None:
        if not 1 <= count <= self._limits.max_batch:
            raise FieldError(f"{count} items; 1 .. {self._limits.max_batch} (max_batch) are allowed", field="items")

    def create_plan(self, session: Session, message: bytes, context: Context) -> bytes:
        """CreatePlan: validates, chooses and warms: the kernel is loaded, or compiled if the cache lacks it."""
        request = _parse(selection_pb2.CreatePlanRequest, message).selection
        self._enter(session, context)
        try:
            decoder = Decoder(self._backend, session.regions, self._limits)
            checked = decoder.selection(request, "selection.")
            if decoder.inline:
                raise FieldError("tensors of a plan lie in regions; inline data is for single calls", field="selection")
            self._executor.prepare([checked], ["selection."])
            with session.lanes_held():
                kernel, reason = kernels.warm_select(checked)
            plan = Plan(checked, kernel, reason, _regions_of(request))
            plan_id = session.add_plan(plan)
        finally:
            self.queue.leave(session.account)
        return selection_pb2.CreatePlanResponse(plan_id=plan_id, kernel=kernel, reason=reason).SerializeToString()

    def release_plan(self, session: Session, message: bytes, context: Context) -> bytes:
        """ReleasePlan."""
        request = _parse(selection_pb2.ReleasePlanRequest, message)
        self._enter(session, context)
        try:
            with session.lanes_held():
                session.drop_plan(request.plan_id)
        finally:
            self.queue.leave(session.account)
        return b""

    def open_lane(self, session: Session, message: bytes, context: Context) -> bytes:
        """OpenLane: prepares the plans, so that a call has nothing left to do but run."""
        request = _parse(selection_pb2.OpenLaneRequest, message)
        plan_ids = list(request.plan_ids)
        words = session.words
        if words is None:
            raise DeviceMismatchError("sessions over TCP share no memory, so they have no lanes", field="plan_ids")
        if not 1 <= len(plan_ids) <= self._limits.max_plans:
            text = f"a lane of {len(plan_ids)} plans; 1 .. {self._limits.max_plans} (max_plans) are allowed"
            raise FieldError(text, field="plan_ids")
        self._enter(session, context)
        try:
            for place, plan_id in enumerate(plan_ids):
                path = f"plan_ids[{place}]"
                plan = _plan(session, plan_id, path)
                if plan.batch is None:
                    batch = self._executor.prepare([plan.request], [f"{path}."])
                    if batch.inline:
                        raise FieldError("a plan of a lane has all its outputs in regions", field=path)
                    plan.batch = batch
            if session.lanes is None:
                sys.setswitchinterval(_LANES_SWITCH_S)
                numbers = range(FIRST_LANE, FIRST_LANE + self._limits.max_lanes)
                slots = self._backend.open_slots(words, numbers, self._executor, self._recorder)
                polled = Polled(words, self.queue, self._metrics, self._log)
                better = self._backend.open_dispatches(words, polled, self.queue, self._metrics, self._log)
                session.lanes = Lanes(words, slots, session.lane_batch, [*better, polled], self._metrics)
            signals = self._open_signals(session, request)
            opened = session.lanes.open(plan_ids, signals.address)
            if not _waited_for(context):
                session.lanes.close(opened.number, 0.0)
                raise CallCancelledError("cancelled before the lane was open; it is closed again")
        finally:
            self.queue.leave(session.account)
        reply = selection_pb2.OpenLaneResponse(lane=opened.number, mode=opened.mode, reason=opened.reason)
        if opened.mode != selection_pb2.LANE_MODE_ARMED:
            reply.call_reason = f"the lane is not armed: {opened.reason}"
        else:
            reply.call_code, reply.call_kernel, reply.call_reason = signals.code, signals.kernel, signals.reason
        return reply.SerializeToString()

    def _open_signals(self, session: Session, request: selection_pb2.OpenLaneRequest) -> Signals:
        """Returns where the client's kernel and the worker's meet, if it has memory for that."""
        if not request.HasField("signals"):
            return Signals(0, b"", "", "the client has no memory for tickets and echoes")
        return self._backend.open_signals(request.signals, session.lanes_held)

    def close_lane(self, session: Session, message: bytes, context: Context) -> bytes:
        """CloseLane: answered when nothing of the lane runs any more."""
        lane = _parse(selection_pb2.CloseLaneRequest, message).lane
        if session.lanes is None:
            raise FieldError(f"lane is {lane}; the session has no lanes", field="lane")
        remaining = context.time_remaining()
        session.lanes.close(lane, _LONGEST_SETTLE_S if remaining is None else min(remaining, _LONGEST_SETTLE_S))
        return b""

    def register_region(self, session: Session, message: bytes, context: Context) -> bytes:
        """RegisterRegion: CUDA memory by its IPC handle."""
        request = _parse(selection_pb2.RegisterRegionRequest, message)
        if request.WhichOneof("memory") is None:
            raise FieldError("no memory is named", field="memory")
        if session.remote:
            raise DeviceMismatchError("sessions over TCP share no memory; send tensors inline", field="cuda_ipc")
        memory = request.cuda_ipc
        open_region = partial(self._backend.open_cuda_ipc, memory, session.lanes_held)
        region_id = session.add_region(memory.size, open_region, "cuda_ipc.size")
        return selection_pb2.RegisterRegionResponse(region_id=region_id, size=memory.size).SerializeToString()

    def release_region(self, session: Session, message: bytes, context: Context) -> bytes:
        """ReleaseRegion: answered when nothing can touch the memory any more."""
        request = _parse(selection_pb2.ReleaseRegionRequest, message)
        self._enter(session, context)
        try:
            region = session.take_region(request.region_id)
        finally:
            self.queue.leave(session.account)
        remaining = context.time_remaining()
        session.close_region(region, _LONGEST_SETTLE_S if remaining is None else min(remaining, _LONGEST_SETTLE_S))
        return b""


def _waited_for(context: Context) -> bool:
    """Says whether the caller is still there, and its deadline to come."""
    remaining = context.time_remaining()
    return context.is_active() and (remaining is None or remaining > 0)


def _parse(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError:
        raise FieldError(f"the message is no {kind.DESCRIPTOR.name}", field=kind.DESCRIPTOR.name) from None


def _plan(session: Session, plan_id: int, field: str) -> Plan:
    plan = session.plans.get(plan_id)
    if plan is None:
        raise PlanNotFoundError(plan_id, field)
    return plan


def _regions_of(selection: selection_pb2.Selection) -> frozenset[int]:
    """Returns the regions that a selection's tensors lie in."""
    tensors = [value for _, value in selection.ListFields() if hasattr(value, "region")]
    return frozenset(tensor.region.region_id for tensor in tensors if tensor.HasField("region"))


def make_server(
    service: SelectionService, interceptor: TokenInterceptor, limits: ServerLimits, address: str, *, shared: bool
) -> grpc.Server:
    """Makes and binds the worker's server; the caller starts it.

    All that may wait of all sessions, a full queue of each, leaves threads over that refuse the rest at once.
    """
    options = [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.so_reuseport", 0),
    ]
    sessions = limits.max_sessions if shared else 1
    pool = DirectPool(
        (limits.max_queue + limits.max_streams) * sessions + _REFUSING_THREADS, thread_name_prefix="topkd-rpc"
    )
    server = grpc.server(pool, handlers=[service.handler()], interceptors=[interceptor], options=options)
    server.add_insecure_port(address)
    return server
