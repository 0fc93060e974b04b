from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

import topkd
from tests.conftest import Server, StartServer
from tests.e2e.processes import wait_until
from topkd._session import open_tcp_channel

TOKEN = "a-token-of-the-tests-0123456789abcdef"


@pytest.fixture(scope="module")
def tcp(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, str]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    return start_server(tcp=target, tcp_token_file=token, limit="region_bytes=65536"), target


def test_selections_go_inline(tcp: tuple[Server, str]) -> None:
    with topkd.Client(tcp[1], token=TOKEN) as client:
        array = np.random.default_rng(1).permutation(4000).reshape(4, 1000).astype(np.float32)
        wanted = np.argsort(-array, axis=1)[:, :5]
        result = client.select_topk(array, 5, order="value", values=True, lengths=np.full(4, 1000, np.int32))
        assert (result.indices == wanted).all()
        assert (result.values == np.take_along_axis(array, wanted, 1)).all()
        out = torch.empty(4, 8, dtype=torch.int64)[:, :5]
        tensor = torch.from_numpy(array)
        assert client.select_topk(tensor, 5, order="value", index_dtype="int64", out_indices=out).indices is out
        assert (out.numpy() == wanted).all()
        assert client.select_topk(tensor.bfloat16(), 5, values=True).values.dtype == torch.bfloat16
        merged = client.merge_topk(array, np.arange(4000, dtype=np.int64).reshape(4, 1000), 1)
        assert merged.indices[:, 0].tolist() == [int(row[0]) + 1000 * r for r, row in enumerate(wanted)]


def test_sessions_spread_over_the_addresses_of_a_name() -> None:
    """As over a headless Service: each session's channel takes one address at random, and all its calls go there."""

    def serve(place: int) -> tuple[grpc.Server, int]:
        def answer(request: bytes, context: object) -> bytes:
            return bytes([place])

        handlers = grpc.method_handlers_generic_handler("t", {"Who": grpc.unary_unary_rpc_method_handler(answer)})
        server = grpc.server(ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, port

    servers = [serve(place) for place in range(2)]
    name = "ipv4:" + ",".join(f"127.0.0.1:{port}" for _, port in servers)
    taken = []
    for _ in range(40):
        with open_tcp_channel(name, None) as channel:
            who = channel.unary_unary("/t/Who")
            [place] = {who(b"", timeout=30)[0] for _ in range(3)}
            taken.append(place)
    for server, _ in servers:
        server.stop(0).wait()
    assert set(taken) == {0, 1}, "one address in 40 channels comes by chance once in 10^12 runs"


def test_errors_are_the_same(tcp: tuple[Server, str]) -> None:
    with topkd.Client(tcp[1], token=TOKEN) as client:
        array = np.zeros((2, 8), np.float32)
        with pytest.raises(topkd.ArgumentValueError, match="k is 0"):
            client.select_topk(array, 0)
        for options, argument in (
            ({"out_indices": np.zeros((2, 3), np.int32)}, "out_indices"),
            ({"out_values": np.zeros((2, 1), np.float32)}, "out_values"),
            ({"out_indices": array[:, :1].view(np.int32)}, "out_indices"),
        ):
            with pytest.raises(topkd.ArgumentValueError, match=argument) as caught:
                client.select_topk(array, 1, **options)
            assert caught.value.argument == argument


def test_memory_cannot_be_shared(tcp: tuple[Server, str]) -> None:
    with topkd.Client(tcp[1], token=TOKEN) as client:
        for call in (lambda: client.empty(4), lambda: client.plan(np.zeros((1, 4), np.float32), 1)):
            with pytest.raises(topkd.RegionError, match="over TCP"):
                call()


@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_attach_token_is_wanted(tcp: tuple[Server, str], token: str | None) -> None:
    with topkd.Client(tcp[1], token=token) as client, pytest.raises(topkd.AuthenticationError):
        client.connect()


def test_nobody_there(tmp_path: Path) -> None:
    with (
        topkd.Client("127.0.0.1:1", attach_timeout=0.5) as client,
        pytest.raises(topkd.UnavailableError, match=r"no server at 127\.0\.0\.1:1: .* \(tried \d+ times\)"),
    ):
        client.connect()


def test_a_lost_stream_is_noticed_and_attached_anew(tcp: tuple[Server, str]) -> None:
    with topkd.Client(tcp[1], token=TOKEN) as client:
        client.connect()
        client._core.session._stream.cancel()  # type: ignore[union-attr]
        wait_until(lambda: not client.attached, 5, "the client notices")
        assert client.select_topk(np.eye(2, dtype=np.float32), 1).indices.tolist() == [[0], [1]]


def test_memory_limits_fall_back_to_the_message(tcp: tuple[Server, str]) -> None:
    with topkd.Client(tcp[0].socket_dir) as client:
        array = np.random.default_rng(1).permutation(100_000).reshape(20, 5000).astype(np.float32)
        wanted = np.argsort(-array, axis=1)[:, :3]
        assert (client.select_topk(array, 3, order="value").indices == wanted).all()
        with pytest.raises(topkd.ResourceExhaustedError):
            client.empty((1, 1 << 20), "float32")
        with pytest.raises(topkd.ArgumentValueError, match="inline"):
            client.select_topk(np.zeros((1, 20 << 20), np.float32), 3)


def test_a_name_with_several_servers_gives_each_client_one_of_them() -> None:
    """As a headless Service's name has: the calls of a client stay together, the clients spread."""
    method = "/test.Which/Get"
    with ThreadPoolExecutor() as pool:
        servers = [grpc.server(pool), grpc.server(pool)]
        ports = []
        for place, server in enumerate(servers):
            answer = grpc.unary_unary_rpc_method_handler(lambda request, _context, place=place: bytes([place]))
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Which", {"Get": answer})])
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            server.start()
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        clients = []
        for _ in range(30):
            with open_tcp_channel(target, None) as channel:
                clients.append({channel.unary_unary(method)(b"", timeout=10) for _ in range(3)})
        for server in servers:
            server.stop(None).wait()
    assert {len(asked) for asked in clients} == {1}
    assert set().union(*clients) == {b"\0", b"\1"}
