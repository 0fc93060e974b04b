"""Every method that there is, and calls of them with whatever metadata."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

import topkd.v1
from tests.e2e.raw import TIMEOUT, Refusal, refusal

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Method:
    """A method as its descriptor has it."""

    service: str
    name: str
    client_streams: bool
    server_streams: bool

    @property
    def path(self) -> str:
        """As HTTP/2 has it."""
        return f"/{self.service}/{self.name}"

    def call(self, channel: grpc.Channel, metadata: Metadata, message: bytes = b"") -> Refusal | bytes:
        """Calls it with bytes; returns the refusal, or the first reply."""
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        method = kinds[self.client_streams, self.server_streams](self.path)
        request = iter([message]) if self.client_streams else message
        try:
            reply = method(request, metadata=metadata, timeout=TIMEOUT)
            if not self.server_streams:
                return bytes(reply)
            first = bytes(next(reply))
            reply.cancel()
        except grpc.RpcError as error:
            return refusal(error)
        return first


def _files() -> list[FileDescriptor]:
    """Returns every file of the protocol, whatever files there are."""
    names = [module.name for module in pkgutil.iter_modules(topkd.v1.__path__) if module.name.endswith("_pb2")]
    return [importlib.import_module(f"topkd.v1.{name}").DESCRIPTOR for name in names]


METHODS = [
    Method(service.full_name, method.name, method.client_streaming, method.server_streaming)
    for file in _files()
    for service in file.services_by_name.values()
    for method in service.methods
]
REFLECTION = Method("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", True, True)


def wrong_credentials(own: str, foreign: str) -> dict[str, Metadata]:
    """Returns metadata that must not open anything.

    Args:
        own: the token that is right, for what is nearly right.
        foreign: the token of a session that is served elsewhere.
    """
    return {
        "none": (),
        "empty": (("topkd-token", ""),),
        "made-up": (("topkd-token", "A" * len(own)),),
        "cut": (("topkd-token", own[:-1]),),
        "longer": (("topkd-token", own + "A"),),
        "other-case": (("topkd-token", own.swapcase()),),
        "long": (("topkd-token", "A" * 4096),),
        "binary": (("topkd-token-bin", own.encode()),),
        "as-attach-token": (("topkd-attach-token", own),),
        "as-authorization": (("authorization", f"Bearer {own}"),),
        "foreign": (("topkd-token", foreign),),
    }
