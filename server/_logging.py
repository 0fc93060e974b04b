"""Structured logs on stderr."""

import logging
import sys
from typing import Any, cast

import structlog

__all__ = ["Logger", "configure"]

Logger = Any  # structlog's bound loggers are typed by duck


def configure(level: str, form: str, **context: object) -> Logger:
    """Sets structlog up for this process and returns its logger, bound to `context`.

    Args:
        level: "debug", "info", "warning" or "error".
        form: "json" (one object a line) or "console".
        context: keys that every line carries.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    return cast(Logger, structlog.get_logger()).bind(**context)
