"""The front's gRPC side: ControlService, health, reflection, the token check, and the forwarding for TCP sessions."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2

from ._logging import Logger
from ._tokens import ATTACH_TOKEN_KEY, HEALTH_PREFIX, TOKEN_KEY, digest, metadata_value, request_id
from .errors import FieldError, ServerError, TokenInvalidError, WorkerLostError, outcome_of, to_status
from .metrics import ServerMetrics

__all__ = ["CONTROL", "SELECTION", "ControlService", "Forwarder", "TokenInterceptor", "abort", "service_names"]

CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
SELECTION = selection_pb2.DESCRIPTOR.services_by_name["SelectionService"].full_name
ATTACH_METHOD = f"/{CONTROL}/Attach"
_GONE = "the worker of the sessions over TCP is gone; attach again"
_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = Any  # grpc.aio.ServicerContext, whose stubs lack what is used here


def service_names() -> tuple[str, ...]:
    """Returns the services that reflection lists."""
    health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    return (CONTROL, SELECTION, health, reflection.SERVICE_NAME)


async def abort(context: Context, error: Exception, log: Logger | None = None) -> None:
    """Ends a call with the status of an exception; does not return."""
    identity = request_id(context.invocation_metadata())
    status = to_status(error, identity)
    if log is not None:
        known = isinstance(error, ServerError)
        report = log.info if known else log.error
        report("request_refused", request_id=identity, message=str(error), exc_info=None if known else error)
    trailing = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_CODES[status.code], status.message, trailing_metadata=trailing)


def _parsing(handler: Any) -> Any:
    """Returns a handler that answers bytes which are no message with INVALID_ARGUMENT, where grpc says UNKNOWN."""
    parse = None if handler is None or handler.request_streaming else handler.request_deserializer
    if parse is None:
        return handler
    run = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def checked(message: bytes, context: Context) -> Any:
        try:
            request = parse(message)
        except DecodeError:
            await abort(context, FieldError("the message cannot be parsed", field="message"))
            return None
        return await run(request, context)

    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(checked, response_serializer=handler.response_serializer)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses calls without a valid token before any handler sees them. Health is exempt.

    Args:
        valid: says whether a session's token is valid.
        metrics: where refusals are counted.
        attach_digest: digest of the attach token that `Attach` needs; None: no token attaches here.
        attach_open: the peer has shown a certificate, which is enough to attach.
    """

    def __init__(
        self,
        valid: Callable[[str | None], bool],
        metrics: ServerMetrics,
        attach_digest: bytes | None = None,
        attach_open: bool = False,
    ) -> None:
        self._valid = valid
        self._metrics = metrics
        self._attach_digest = attach_digest
        self._attach_open = attach_open
        by_token = f"{ATTACH_TOKEN_KEY} is absent or wrong"
        self._attach_refusal = by_token if attach_digest else "on this host, attach by the side socket (attach.sock)"

    def _passes(self, method: str, metadata: Any) -> bool:
        if method.startswith(HEALTH_PREFIX):
            return True
        if method == ATTACH_METHOD:
            token = metadata_value(metadata, ATTACH_TOKEN_KEY)
            return self._attach_open or (token is not None and digest(token) == self._attach_digest)
        return self._valid(metadata_value(metadata, TOKEN_KEY))

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Passes calls on, or puts a refusal of the same kind in the handler's place."""
        handler = await continuation(details)
        if self._passes(details.method, details.invocation_metadata):
            return _parsing(handler)
        self._metrics.requests.labels("unauthenticated", "UNAUTHENTICATED").inc()
        attaches = details.method == ATTACH_METHOD

        async def refuse(_: Any, context: Context) -> None:
            await abort(context, TokenInvalidError(self._attach_refusal) if attaches else TokenInvalidError())

        if handler is None or not (handler.request_streaming or handler.response_streaming):
            return grpc.unary_unary_rpc_method_handler(refuse)
        if not handler.request_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(refuse)
        return grpc.stream_stream_rpc_method_handler(refuse)


class ControlService(control_pb2_grpc.ControlServiceServicer):  # type: ignore[misc, unused-ignore]
    """GetServerInfo and Attach.

    Args:
        info: makes the server information.
        attach: runs a session over TCP: yields its events. On the Unix socket no call gets here.
        metrics: where calls are counted.
        log: where refusals go.
    """

    def __init__(
        self,
        info: Callable[[], control_pb2.ServerInfo],
        attach: Callable[[control_pb2.AttachRequest], AsyncGenerator[control_pb2.AttachResponse, None]],
        metrics: ServerMetrics,
        log: Logger,
    ) -> None:
        self._info = info
        self._attach = attach
        self._metrics = metrics
        self._log = log

    async def GetServerInfo(  # noqa: N802  # the method's name
        self, request: Any, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """Says who serves."""
        started = time.perf_counter()
        reply = control_pb2.GetServerInfoResponse(info=self._info())
        self._metrics.requests.labels("GetServerInfo", "OK").inc()
        self._metrics.request_seconds.labels("GetServerInfo").observe(time.perf_counter() - started)
        return reply

    async def Attach(  # type: ignore[override]  # noqa: N802  # grpc.aio takes a coroutine that writes as well
        self, request: control_pb2.AttachRequest, context: Context
    ) -> None:
        """Begins a session over TCP; the call is its lease."""
        code = "OK"
        try:
            async with contextlib.aclosing(self._attach(request)) as events:
                async for event in events:
                    await context.write(event)
        except ServerError as error:
            code = outcome_of(error).name
            self._metrics.attaches.labels("tcp", "refused").inc()
            await abort(context, error, self._log)
        finally:
            self._metrics.requests.labels("Attach", code).inc()


class Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Forwards SelectionService to the shared worker, bytes for bytes.

    Args:
        channel: returns the channel to the shared worker, or None while there is none.
    """

    def __init__(self, channel: Callable[[], grpc.aio.Channel | None]) -> None:
        self._channel = channel

    def service(self, details: Any) -> Any:
        """Returns a handler for any method of SelectionService."""
        method = details.method
        if not method.startswith(f"/{SELECTION}/"):
            return None

        if method == f"/{SELECTION}/SelectTopKStream":

            async def pump(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
                async with contextlib.aclosing(self._pump(method, requests, context)) as replies:
                    async for reply in replies:
                        yield reply

            return grpc.stream_stream_rpc_method_handler(pump)

        async def forward(message: bytes, context: Context) -> bytes:
            return await self._forward(method, message, context)

        return grpc.unary_unary_rpc_method_handler(forward)

    async def _forward(self, method: str, message: bytes, context: Context) -> bytes:
        channel = await self._open(context)
        multicallable: Any = channel.unary_unary(method)
        call = multicallable(message, timeout=context.time_remaining(), metadata=_metadata(context))
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            await _pass_on(error, context)
            raise
        return reply

    async def _pump(self, method: str, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
        """Forwards a stream both ways; either side's flow control reaches the other's."""
        channel = await self._open(context)
        multicallable: Any = channel.stream_stream(method)
        call = multicallable(requests, timeout=context.time_remaining(), metadata=_metadata(context))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            await _pass_on(error, context)
            raise
        finally:
            call.cancel()

    async def _open(self, context: Context) -> grpc.aio.Channel:
        """Returns the channel to the shared worker; ends the call while there is none."""
        channel = self._channel()
        if channel is None:
            await abort(context, WorkerLostError(_GONE))
            raise WorkerLostError(_GONE)
        return channel


def _metadata(context: Context) -> list[tuple[str, Any]]:
    return [pair for pair in context.invocation_metadata() if pair[0].startswith("topkd-")]


async def _pass_on(error: grpc.aio.AioRpcError, context: Context) -> None:
    """Ends a call as the one that was forwarded ended; does not return."""
    trailing = tuple(pair for pair in error.trailing_metadata() or () if pair[0] == _DETAILS_KEY)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not trailing:
        await abort(context, WorkerLostError(_GONE))
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailing)
