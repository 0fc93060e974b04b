"""The front's gRPC endpoints, and the TCP port's credentials."""

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from topkd.v1 import control_pb2_grpc

from ._front_rpc import ControlService, TokenInterceptor, service_names
from ._tokens import digest
from .config import ConfigError, ServerConfig, split_address

__all__ = ["LIVE", "bind_tcp", "make_health_server", "make_server", "read_attach_token"]

LIVE = "live"
"""Name under which the health service says that the process itself is well, whatever its devices are."""

_SHORTEST_TOKEN = 16


def make_server(
    config: ServerConfig,
    interceptor: TokenInterceptor,
    service: ControlService,
    health_service: health.aio.HealthServicer,
    *extra: grpc.GenericRpcHandler,
) -> grpc.aio.Server:
    """Makes a server of the control plane, health and reflection; not bound, not started."""
    options = [
        ("grpc.max_receive_message_length", config.limits.max_message_bytes),
        ("grpc.max_send_message_length", config.limits.max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
    server = grpc.aio.server(interceptors=(interceptor,), options=options)
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection(service_names(), server)
    if extra:
        server.add_generic_rpc_handlers(extra)
    return server


async def make_health_server(address: str, health_service: health.aio.HealthServicer) -> grpc.aio.Server:
    """Starts a server that answers health checks alone, without TLS or a token: it tells nothing else.

    Raises:
        ConfigError: the address cannot be bound.
    """
    split_address(address, "health_address")
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"health_address {address} cannot be bound: {error}") from error
    await server.start()
    return server


def read_attach_token(config: ServerConfig) -> bytes | None:
    """Returns the digest of the token that attaches over TCP, or None if there is none.

    Raises:
        ConfigError: the file holds no token that is worth the name.
    """
    path = config.tcp_token_file
    if path is None:
        return None
    token = path.read_bytes().strip()
    if len(token) < _SHORTEST_TOKEN or not all(0x20 <= byte < 0x7F for byte in token):  # others cannot be metadata
        raise ConfigError(
            f"tcp_token_file {path} holds no token of {_SHORTEST_TOKEN} printable ASCII characters or more"
        )
    return digest(token)


def bind_tcp(server: grpc.aio.Server, config: ServerConfig, address: str) -> int:
    """Binds the TCP port, with TLS if there is a certificate; returns its number.

    Raises:
        ConfigError: it cannot be bound.
    """
    try:
        if config.tls_cert is None or config.tls_key is None:
            return int(server.add_insecure_port(address))
        authority = None if config.tls_client_ca is None else config.tls_client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials(
            [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ConfigError(f"tcp_address {address} cannot be bound: {error}") from error
