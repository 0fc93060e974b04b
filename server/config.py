"""Options of a server, and the one place of `topkd.server` that reads the environment.

Every option has a variable `TOPKD_<OPTION>`, limits `TOPKD_LIMIT_<LIMIT>`; what is given in code or on the command line
wins.
"""

import dataclasses
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkd._paths import default_socket_dir
from topkd._words import MOST_LANES, MOST_SLOTS

__all__ = ["ConfigError", "ServerConfig", "ServerLimits", "mps_pipe_directory"]

DEFAULT_METRICS_PORT = 9477
_LONGEST_SOCKET = "/w-0123456789abcdef.sock"
_SOCKET_PATH_BYTES = 107
_MOST_CPU_FRONTS = 64


class ConfigError(ValueError):
    """An option that cannot be used; the message names it and says what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds that the server enforces and reports.

    Attributes:
        max_sessions: sessions open at once, of both transports.
        max_regions: regions of one session.
        max_region_bytes: bytes of one region.
        max_session_bytes: bytes of all regions of one session.
        max_plans: plans of one session.
        max_batch: entries of one request.
        max_rows: rows of one selection.
        max_message_bytes: bytes of one gRPC message in either direction.
        max_queue: requests of one session that wait or run.
        max_slots: slots of a session's words, for ordered calls; on a GPU each takes a hardware queue while it waits.
        max_ready_timeout_ms: longest time that an ordered call may wait for its ready word.
        max_streams: streams of one session that may be open.
        max_lanes: lanes of one session that may be open.
    """

    max_sessions: int = 16
    max_regions: int = 1024
    max_region_bytes: int = 1 << 40
    max_session_bytes: int = 1 << 40
    max_plans: int = 1024
    max_batch: int = 1024
    max_rows: int = 1 << 24
    max_message_bytes: int = 64 << 20
    max_queue: int = 64
    max_slots: int = 8
    max_ready_timeout_ms: int = 10_000
    max_streams: int = 4
    max_lanes: int = 8

    def check(self) -> None:
        """Raises ConfigError on a limit that is not positive or does not fit the protocol's field."""
        for name, value in dataclasses.asdict(self).items():
            top = (1 << 31) - 1 if name in _SMALL_LIMITS else (1 << 63) - 1
            top = _SMALLEST_LIMITS.get(name, top)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= top:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of 1 .. {top}")


_LOWEST = {"spares": 1, "drain_grace_s": 0, "session_grace_s": 0, "start_timeout_s": 1, "front_timeout_s": 1}
_PATHS = frozenset({"socket_dir", "tcp_token_file", "tls_cert", "tls_key", "tls_client_ca"})
_SMALLEST_LIMITS = {"max_slots": MOST_SLOTS, "max_streams": 64, "max_lanes": MOST_LANES}
_SMALL_LIMITS = frozenset(
    {
        "max_sessions",
        "max_regions",
        "max_plans",
        "max_batch",
        "max_message_bytes",
        "max_queue",
        "max_ready_timeout_ms",
    }
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of one server.

    Attributes:
        device: "auto" (CUDA if there is a GPU, else the CPU), "cpu", "cuda", "cuda:N" or a GPU's UUID ("GPU-...").
        devices: several, for a server with a front for each: "all" (every GPU), "cpu:N" (N fronts on the CPU), or a
            comma-separated list of "cuda:N" and UUIDs. None: the one of `device`.
        socket_dir: directory of the sockets; made with mode 0750 if absent.
        allowed_uids: users that may attach; None means the server's own. Root always may.
        allowed_gids: groups whose members may attach too; the first becomes the group of a directory that is made.
        tcp_address: "host:port" of the TCP endpoint (port 0: any free one), or None: no TCP.
        tcp_token_file: file that holds the attach token of TCP clients.
        tls_cert, tls_key: PEM files of the TCP endpoint's certificate and key.
        tls_client_ca: PEM file of the authority of client certificates; if set, every TCP client needs one.
        allow_insecure_tcp: serve TCP beyond loopback without TLS all the same.
        health_address: "host:port" of a port that answers health checks alone, in plain text (a kubelet's probe), or
            None: no such port.
        metrics_host, metrics_port: address of `/metrics`; port 0 is any free one, None switches it off.
        limits: bounds.
        spares: workers kept warm for sessions to come.
        drain_grace_s: seconds that calls in flight have to finish after SIGTERM.
        session_grace_s: seconds that a worker has to end in order after its session; then it is killed.
        start_timeout_s: seconds that a worker has to become ready.
        front_timeout_s: seconds after which a front of several that answers no health check is killed and started anew.
        attach_timeout_s: seconds that an attaching client waits for a worker, or the server for the attach message.
        cpu_threads: threads of one operation on the CPU backend; None means up to four.
        log_level: "debug", "info", "warning" or "error".
        log_format: "json" or "console", on stderr.
    """

    device: str = "auto"
    devices: str | None = None
    socket_dir: Path = field(default_factory=default_socket_dir)
    allowed_uids: tuple[int, ...] | None = None
    allowed_gids: tuple[int, ...] = ()
    tcp_address: str | None = None
    tcp_token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allow_insecure_tcp: bool = False
    health_address: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = DEFAULT_METRICS_PORT
    limits: ServerLimits = field(default_factory=ServerLimits)
    spares: int = 1
    drain_grace_s: float = 10.0
    session_grace_s: float = 1.0
    start_timeout_s: float = 120.0
    front_timeout_s: float = 30.0
    attach_timeout_s: float = 30.0
    cpu_threads: int | None = None
    log_level: str = "info"
    log_format: str = "json"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **options: Any) -> "ServerConfig":
        """Builds a configuration from `TOPKD_*` variables; `options` that are not None win over them.

        Args:
            environ: variables to read; None means those of the process.
            options: fields of ServerConfig or of ServerLimits by name; None means not given (metrics are switched off
                by `metrics_port="off"`).

        Raises:
            ConfigError: a variable that cannot be read, or a configuration that cannot be used.
        """
        env = os.environ if environ is None else environ
        given = {name: value for name, value in options.items() if value is not None}
        base = given.pop("limits", None) or ServerLimits()
        limits: dict[str, Any] = {}
        for name in (f.name for f in dataclasses.fields(ServerLimits)):
            if name in given:
                limits[name] = given.pop(name)
            elif text := env.get(f"TOPKD_LIMIT_{name.removeprefix('max_').upper()}"):
                limits[name] = _read(name, text, int)
        for name, parse in _PARSERS.items():
            if name not in given and (text := env.get(f"TOPKD_{name.upper()}")):
                given[name] = _read(name, text, parse)
        for name in _PATHS & given.keys():
            given[name] = Path(given[name])
        if given.get("metrics_port") == "off":
            given["metrics_port"] = None
        config = cls(limits=dataclasses.replace(base, **limits), **given)
        config.check()
        return config

    @property
    def uids(self) -> frozenset[int]:
        """Users that may attach besides root."""
        return frozenset({os.geteuid()} if self.allowed_uids is None else self.allowed_uids)

    def check(self) -> None:
        """Raises ConfigError on the first option that cannot be used."""
        self.limits.check()
        _check_device(self.device)
        if self.devices is not None:
            _check_devices(self.devices)
        if len(os.fsencode(self.socket_dir)) + len(_LONGEST_SOCKET) > _SOCKET_PATH_BYTES:
            raise ConfigError(f"socket_dir {self.socket_dir} is too long for a Unix socket in it; take a shorter path")
        for name, low in _LOWEST.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least {low}")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError(f"cpu_threads is {self.cpu_threads}; it must be at least 1")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; it must be 0 .. 65535, or off")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level is {self.log_level!r}; it must be debug, info, warning or error")
        if self.log_format not in ("json", "console"):
            raise ConfigError(f"log_format is {self.log_format!r}; it must be json or console")
        if self.health_address is not None:
            split_address(self.health_address, "health_address")
        if self.tcp_address is not None:
            self._check_tcp(self.tcp_address)

    def _check_tcp(self, address: str) -> None:
        host, _ = split_address(address)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: one is missing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")
        if self.tcp_token_file is None and self.tls_client_ca is None:
            raise ConfigError(
                "tcp_address needs tcp_token_file (an attach token) or tls_client_ca (client certificates)"
            )
        if self.tls_cert is None and not is_loopback(host) and not self.allow_insecure_tcp:
            raise ConfigError(
                f"tcp_address {address} is not loopback and TLS is off: tokens and scores would cross the network in "
                "plain text. Give tls_cert and tls_key, or allow_insecure_tcp if the network is trusted"
            )


def mps_pipe_directory(environ: Mapping[str, str] | None = None) -> str:
    """Returns where an MPS daemon keeps its pipes: NVIDIA's variable, or NVIDIA's default."""
    env = os.environ if environ is None else environ
    return env.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"


def split_address(address: str, option: str = "tcp_address") -> tuple[str, int]:
    """Splits "host:port" ("[::1]:80" for IPv6) of an option. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} is {address!r}; it must be host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Says whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_device(device: str) -> None:
    if device in ("auto", "cpu", "cuda") or device.startswith(("GPU-", "MIG-")):
        return
    if device.startswith("cuda:") and device[5:].isdecimal():
        return
    raise ConfigError(f'device is {device!r}; it must be "auto", "cpu", "cuda", "cuda:N" or a UUID "GPU-..."')


def _check_devices(devices: str) -> None:
    kind, _, count = devices.partition(":")
    if devices == "all" or (kind == "cpu" and count.isdecimal() and 1 <= int(count) <= _MOST_CPU_FRONTS):
        return
    names = devices.split(",")
    if all(name.startswith(("cuda:", "GPU-", "MIG-")) for name in names) and len(set(names)) == len(names):
        for name in names:
            _check_device(name)
        return
    raise ConfigError(
        f'devices is {devices!r}; it must be "all", "cpu:N" (N up to {_MOST_CPU_FRONTS}), or different "cuda:N" and '
        'UUIDs "GPU-...", separated by commas'
    )


def _read(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} in the environment; it cannot be read") from None


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _port(text: str) -> int | None:
    return None if text.strip().lower() in ("off", "none") else int(text)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "device": str,
    "devices": str,
    "socket_dir": Path,
    "allowed_uids": _ids,
    "allowed_gids": _ids,
    "tcp_address": str,
    "tcp_token_file": Path,
    "tls_cert": Path,
    "tls_key": Path,
    "tls_client_ca": Path,
    "allow_insecure_tcp": _bool,
    "health_address": str,
    "metrics_host": str,
    "metrics_port": _port,
    "spares": int,
    "drain_grace_s": float,
    "session_grace_s": float,
    "start_timeout_s": float,
    "front_timeout_s": float,
    "attach_timeout_s": float,
    "cpu_threads": int,
    "log_level": str,
    "log_format": str,
}
