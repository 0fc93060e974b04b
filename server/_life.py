"""The life of a process of the server: it starts, serves until SIGTERM or SIGINT, and ends in order."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any, Protocol

from ._logging import Logger

__all__ = ["Service", "live"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Service(Protocol):
    """What a process lives for: a front, or a fleet of them."""

    async def start(self) -> Any:
        """Returns once it serves. May raise, and may be cancelled; `stop` follows either way."""

    async def stop(self) -> None:
        """Refuses new work, lets what runs finish, closes everything, however far the start came."""

    def draining(self) -> dict[str, int]:
        """Returns what the log says of it when its end begins."""


async def live(make: Callable[[], Service], log: Logger, on_started: Callable[[Any], None] | None = None) -> None:
    """Makes and starts a service, waits for SIGTERM or SIGINT, and stops it. The signals end its start too.

    Args:
        make: called when the signals are watched already, so that none is missed.
        log: says `draining` (with what the service says of itself) and `stopped`.
        on_started: called with what the start returned.

    Raises:
        Exception: what the start raised, after the service has been stopped.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    service = make()
    try:
        starting = asyncio.ensure_future(service.start())
        waiting = asyncio.ensure_future(stopped.wait())
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            started = starting.result()
            if on_started is not None:
                on_started(started)
            await waiting
        else:
            starting.cancel()
        log.info("draining", **service.draining())
    finally:
        await service.stop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    log.info("stopped")
