"""What the commands share: options, output, progress."""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topkd._types import TlsOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from topkd import Client

__all__ = [
    "CommandError",
    "UsageError",
    "add_json",
    "add_target",
    "connect",
    "number",
    "print_json",
    "progress",
    "read_file",
    "size",
    "tls_options",
    "version",
]


class CommandError(Exception):
    """A command that cannot be carried out; the message is for the user.

    Attributes:
        status: The exit status.
    """

    status = 1


class UsageError(CommandError):
    """Options that cannot be used, whatever the state of things."""

    status = 2


def version() -> str:
    """Returns the version of the installed package."""
    return importlib.metadata.version("topkd")


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON document on standard output") -> None:
    """Adds `--json`, which does `what`."""
    parser.add_argument("--json", action="store_true", help=what)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which server is meant."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--target",
        "--socket-dir",
        dest="target",
        metavar="DIR|HOST:PORT",
        help="the server's socket directory or TCP address (default: $TOPKD_SOCKET_DIR, or where a server is found)",
    )
    group.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="SECONDS", help="time-out of one call (default 10)"
    )
    group.add_argument("--token-file", type=Path, metavar="FILE", help="attach token of a TCP server")
    group.add_argument("--tls", action="store_true", help="encrypt, with the system's certificate authorities")
    group.add_argument("--tls-ca", type=Path, metavar="PEM", help="encrypt, with this authority")
    group.add_argument("--tls-cert", type=Path, metavar="PEM", help="client certificate, with --tls-key")
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="key of the client certificate")


def seconds(text: str) -> float:
    """Reads a time-out for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def read_file(path: Path) -> bytes:
    """Returns a file's bytes. Raises CommandError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def tls_options(args: argparse.Namespace) -> TlsOptions | None:
    """Returns the TLS that the options ask for, None for plain text."""
    if not (args.tls or args.tls_ca or args.tls_cert or args.tls_key):
        return None
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together: one is missing")
    return TlsOptions(
        ca=read_file(args.tls_ca) if args.tls_ca else None,
        certificate=read_file(args.tls_cert) if args.tls_cert else None,
        key=read_file(args.tls_key) if args.tls_key else None,
    )


def connect(args: argparse.Namespace) -> Client:
    """Returns a client of the server that the options name; it attaches with its first call."""
    from topkd import Client

    token = read_file(args.token_file).decode(errors="replace").strip() if args.token_file else None
    return Client(
        args.target,
        timeout=args.timeout,
        attach_timeout=args.timeout,
        token=token,
        tls=tls_options(args),
        name=f"topkd {args.command}",
    )


def print_json(document: object, indent: int | None = 2) -> None:
    """Prints one JSON document, on one line if `indent` is None."""
    print(json.dumps(document, indent=indent, allow_nan=False))


def number(value: float) -> float | str:
    """Returns a float as JSON can hold it: "inf", "-inf" and "nan" are text."""
    return value if math.isfinite(value) else str(value)


def size(count: int) -> str:
    """Returns bytes for people.

    Example:
        >>> size(3 << 30)
        '3.0 GiB'
    """
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows on standard error what takes long, while it does; only on a terminal."""
    shown = sys.stderr.isatty()
    started = time.monotonic()
    if shown:
        print(f"\r\x1b[K{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            took = time.monotonic() - started
            end = f"\r\x1b[K{text}: {took:.1f} s\n" if took >= 1 else "\r\x1b[K"
            print(end, end="", file=sys.stderr, flush=True)


def fields(document: Any, indent: str = "") -> Iterator[str]:
    """Yields "name  value" lines of a nested dictionary, for people; what is empty is left out."""
    document = {name: value for name, value in document.items() if value != ""}
    width = max((len(name) for name in document), default=0)
    for name, value in document.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from fields(value, indent + "  ")
        else:
            yield f"{indent}{name:<{width}}  {value}"
