"""`topkd info` and `topkd health`. Neither imports torch."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from topkd._cli_common import add_json, add_target, connect, fields, print_json, size, tls_options

if TYPE_CHECKING:
    import argparse

    from topkd import ServerInfo

__all__ = ["add_commands", "health_status", "info_document"]

_STATUS = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_CHECK = "/grpc.health.v1.Health/Check"


def add_commands(commands: Any) -> None:
    """Adds the commands to the command line."""
    info = commands.add_parser(
        "info", help="show what a server is and has", description="Show what a server is and has."
    )
    health = commands.add_parser(
        "health",
        help="exit 0 if a server is ready, else 1",
        description="Ask a server's health service: exit status 0 if it is SERVING, else 1. Opens no session.",
    )
    for parser, run in ((info, _info), (health, _health)):
        add_target(parser)
        add_json(parser)
        parser.set_defaults(run=run)


def _info(args: argparse.Namespace) -> int:
    with connect(args) as client:
        document = info_document(client.info())
    if args.json:
        print_json(document)
        return 0
    device = document["device"]
    device["memory"] = size(device.pop("memory_bytes")) if device["memory_bytes"] else "unknown"
    document["kernels"] = {family["name"]: " ".join(family["dtypes"]) for family in document["kernels"]}
    print(*fields(document), sep="\n")
    return 0


def info_document(info: ServerInfo) -> dict[str, Any]:
    """Returns a server's information as plain data."""

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in pairs}

    return dataclasses.asdict(info, dict_factory=plain)


def _health(args: argparse.Namespace) -> int:
    from topkd._options import target_directory
    from topkd._paths import device_directories

    status, detail = health_status(args)
    directory = target_directory(args.target)
    names = device_directories(directory) if directory is not None else {}
    devices = {name: health_status(args, name)[0] for name in names}
    if args.json:
        print_json({"status": status, "detail": detail, **({"devices": devices} if devices else {})})
    else:
        print(f"{status}: {detail}" if detail else status)
        print(*(f"{name}  {state}" for name, state in devices.items()), sep="\n", end="\n" if devices else "")
    return 0 if status == "SERVING" else 1


def health_status(args: argparse.Namespace, service: str = "") -> tuple[str, str]:
    """Asks the health service.

    Args:
        args: Where, and for how long.
        service: The device that is meant, of a server of several; "" for all of it.

    Returns:
        The status ("UNREACHABLE" where nobody answered), and what there is to say about it.
    """
    import grpc

    from topkd._options import target_directory
    from topkd._paths import GRPC_SOCKET
    from topkd._session import open_tcp_channel

    directory = target_directory(args.target)
    if directory is not None:
        channel = grpc.insecure_channel(f"unix:{directory / GRPC_SOCKET}")
    else:
        channel = open_tcp_channel(args.target, tls_options(args))
    with channel:
        check = channel.unary_unary(_CHECK, request_serializer=_write_request, response_deserializer=_read_status)
        try:
            return check(service, timeout=args.timeout), ""
        except grpc.RpcError as error:
            where = args.target if directory is None else directory / GRPC_SOCKET
            nobody = error.code() is grpc.StatusCode.UNAVAILABLE
            return "UNREACHABLE", f"{f'no server at {where}' if nobody else error.code().name}: {error.details()}"


def _write_request(service: str) -> bytes:
    """Writes a HealthCheckRequest, which is one text of less than 128 bytes."""
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def _read_status(data: bytes) -> str:
    """Reads a HealthCheckResponse, which is one enum: the base package does not depend on grpcio-health-checking."""
    if not data:
        return _STATUS[0]
    if len(data) == 2 and data[0] == 8 and data[1] < len(_STATUS):
        return _STATUS[data[1]]
    return _STATUS[0]
