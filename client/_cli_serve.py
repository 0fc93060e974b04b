"""`topkd serve`: the server, in the foreground."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from topkd._cli_common import CommandError, UsageError, add_json

__all__ = ["add_commands", "options"]

_EPILOG = """\
Every option has an environment variable (TOPKD_DEVICE, TOPKD_SOCKET_DIR, TOPKD_ALLOWED_UIDS, TOPKD_TCP_ADDRESS,
TOPKD_METRICS_PORT, TOPKD_LIMIT_SESSIONS ...: docs/operations.md); what the command line says wins. On SIGTERM and
SIGINT the server reports NOT_SERVING, takes no new work, lets calls in flight finish, and ends with status 0.
"""


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run a server",
        description="Run a server in the foreground.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--device",
        metavar="NAME",
        help='"auto" (a GPU if there is one; the default), "cpu", "cuda", "cuda:N" or a UUID',
    )
    add(
        "--devices",
        metavar="LIST",
        help='a server for each of several devices, in folders of the socket directory: "all" GPUs, "cpu:N", or '
        '"cuda:N" and UUIDs separated by commas',
    )
    add("--socket-dir", type=Path, metavar="DIR", help="directory of the sockets (default: see docs/operations.md)")
    add(
        "--allow-uid",
        type=int,
        action="append",
        dest="allowed_uids",
        metavar="UID",
        help="user that may attach (repeatable; default: the server's own)",
    )
    add(
        "--allow-gid",
        type=int,
        action="append",
        dest="allowed_gids",
        metavar="GID",
        help="group whose members may attach (repeatable)",
    )
    add("--spares", type=int, metavar="N", help="workers kept warm for sessions to come (default 1)")
    add("--cpu-threads", type=int, metavar="N", help="threads of one operation on the CPU backend (default: up to 4)")
    add(
        "--drain-seconds",
        type=float,
        dest="drain_grace_s",
        metavar="S",
        help="time for calls in flight at the end (default 10)",
    )
    add(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a bound, such as sessions=4 (repeatable; `topkd info` lists them)",
    )
    tcp = parser.add_argument_group("TCP, for callers on other hosts (off by default)")
    add = tcp.add_argument
    add(
        "--tcp",
        dest="tcp_address",
        metavar="HOST:PORT",
        help="serve TCP there; needs --tcp-token-file or --tls-client-ca",
    )
    add("--tcp-token-file", type=Path, metavar="FILE", help="file with the token that a client attaches with")
    add("--tls-cert", type=Path, metavar="PEM", help="certificate, with --tls-key")
    add("--tls-key", type=Path, metavar="PEM", help="key of the certificate")
    add("--tls-client-ca", type=Path, metavar="PEM", help="ask clients for a certificate of this authority")
    add(
        "--allow-insecure-tcp", action="store_true", default=None, help="serve beyond loopback without TLS all the same"
    )
    watch = parser.add_argument_group("observation")
    add = watch.add_argument
    add("--metrics-host", metavar="HOST", help="address of /metrics (default 127.0.0.1)")
    add("--metrics-port", type=_port, metavar="PORT|off", help="port of /metrics (default 9477; 0: any free one)")
    add("--health-address", metavar="HOST:PORT", help="answer health checks there, in plain text (default: off)")
    add("--log-level", choices=["debug", "info", "warning", "error"], help="default: info")
    add("--log-format", choices=["json", "console"], help="on standard error (default: json)")
    add_json(parser, "the same as --log-format json")
    parser.set_defaults(run=_run)


def _port(text: str) -> int | str:
    return text if text == "off" else int(text)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options given, as `ServerConfig.from_environment` takes them.

    Raises:
        UsageError: A limit that cannot be read.
    """
    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and name not in ("command", "run", "limit", "json")
    }
    for name in ("allowed_uids", "allowed_gids"):
        if name in given:
            given[name] = tuple(given[name])
    if args.json:
        given.setdefault("log_format", "json")
    for text in args.limit:
        name, equals, value = text.partition("=")
        if not name.strip() or not equals or not value.strip().isdecimal():
            raise UsageError(f"--limit {text}: it must be NAME=N, such as sessions=4")
        given["max_" + name.strip().removeprefix("max_")] = int(value)
    return given


def _run(args: argparse.Namespace) -> int:
    try:
        from topkd.server.config import ConfigError, ServerConfig, ServerLimits
        from topkd.server.fleet import serve_fleet
        from topkd.server.front import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "topkd":
            raise
        raise CommandError(
            f"a server needs the package {error.name}, which is not installed: pip install 'topkd[server]' "
            "(without kernels for GPUs: 'topkd[cpu-server]')"
        ) from None
    given = options(args)
    if args.device and args.devices:
        raise UsageError("--device and --devices exclude each other")
    for name in given:
        if name.startswith("max_") and name not in ServerLimits.__dataclass_fields__:
            known = ", ".join(limit.removeprefix("max_") for limit in ServerLimits.__dataclass_fields__)
            raise UsageError(f"--limit {name.removeprefix('max_')}: there is no such limit; there are {known}")
    try:
        config = ServerConfig.from_environment(**given)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return serve(config) if config.devices is None else serve_fleet(config)
