"""The port for people and for Prometheus: the status page on `/`, `/metrics`, and the page's files."""

import socket
import threading
from collections.abc import Callable, Iterable
from importlib import resources
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from ._status_page import render
from ._status_readings import History
from .config import ConfigError, ServerConfig

__all__ = ["MetricsServer", "StatusApp"]

_STATIC = {
    "status.css": "text/css",
    "status.js": "text/javascript",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
}
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Server", "topkd"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
Start = Callable[..., Any]


class StatusApp:
    """The WSGI application; answers GET and HEAD. Thread-safe.

    Args:
        registry: what `/metrics` shows.
        history: what the page shows.
    """

    def __init__(self, registry: CollectorRegistry, history: History) -> None:
        self._metrics = make_wsgi_app(registry)
        self._history = history
        folder = resources.files(__package__) / "static"
        self._static = {f"/static/{name}": (kind, (folder / name).read_bytes()) for name, kind in _STATIC.items()}

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answers one request."""
        path, method = environ.get("PATH_INFO") or "/", environ.get("REQUEST_METHOD")
        if method not in ("GET", "HEAD"):
            return _answer(start, "405 Method Not Allowed", "text/plain", b"GET or HEAD\n", ("Allow", "GET, HEAD"))
        if path == "/metrics":
            metrics = self._metrics({**environ, "REQUEST_METHOD": "GET"}, _with_headers(start))
            return [] if method == "HEAD" else metrics
        if path == "/":
            page = render(self._history).encode()
            answer = _answer(start, "200 OK", "text/html", page, ("Cache-Control", "no-store"))
        elif path in self._static:
            kind, content = self._static[path]
            answer = _answer(start, "200 OK", kind, content, ("Cache-Control", "no-cache"))
        else:
            answer = _answer(start, "404 Not Found", "text/plain", b"/ or /metrics\n")
        return [] if method == "HEAD" else answer


def _answer(start: Start, status: str, kind: str, content: bytes, *headers: tuple[str, str]) -> Iterable[bytes]:
    length = ("Content-Length", str(len(content)))
    start(status, [("Content-Type", f"{kind}; charset=utf-8"), length, *headers, *_HEADERS])
    return [content]


def _with_headers(start: Start) -> Start:
    def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        return start(status, [*headers, *_HEADERS], *rest)

    return started


class _Quiet(WSGIRequestHandler):
    """Logs no requests, and gives a peer that sends nothing up."""

    timeout = 10

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a peer that goes away is no error of ours."""

    def server_bind(self) -> None:
        """Binds, and asks no name server who we are."""
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """The port, in a thread of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, server: WSGIServer, history: History) -> None:
        self.port = int(server.server_port)
        self._server = server
        self._history = history
        self._thread = threading.Thread(target=server.serve_forever, name="topkd-http", daemon=True)
        self._history.start()
        self._thread.start()

    @classmethod
    def start(cls, config: ServerConfig, collector: Collector) -> "MetricsServer | None":
        """Starts it for one front, unless it is switched off.

        Raises:
            ConfigError: the port cannot be bound.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        return cls.open(config, registry)

    @classmethod
    def open(cls, config: ServerConfig, registry: CollectorRegistry) -> "MetricsServer | None":
        """Starts it for a registry, unless it is switched off.

        Raises:
            ConfigError: the port cannot be bound.
        """
        if config.metrics_port is None:
            return None
        history = History(registry)
        host = config.metrics_host
        try:
            found = socket.getaddrinfo(host, config.metrics_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, address = found[0]
            kind = _Server6 if family == socket.AF_INET6 else _Server
            app = StatusApp(registry, history)
            return cls(make_server(str(address[0]), config.metrics_port, app, kind, _Quiet), history)
        except OSError as error:
            where = f"{host}:{config.metrics_port}"
            raise ConfigError(
                f"metrics_port: {where} cannot be bound: {error.strerror}; choose another, or off"
            ) from error

    def close(self) -> None:
        """Stops it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._history.close()
