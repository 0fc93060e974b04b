"""Off-host clients: inline tensors over TCP, attached by a token or a certificate, the stream being the lease."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import topkd
from tests.e2e import access, answers, certificates, processes, raw, scrape
from tests.e2e.access import METHODS, REFLECTION
from tests.e2e.answers import UNIQUE, best
from tests.e2e.conftest import Launch
from tests.e2e.raw import Refusal, refused
from tests.e2e.servers import Running, health
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2, selection_pb2_grpc

pytestmark = pytest.mark.timeout(120)
TOKEN = "attach-token-of-the-tests-0123456789"
ATTACH = next(method for method in METHODS if method.name == "Attach")


@dataclass(frozen=True)
class Plain:
    """A server on the loopback without TLS.

    Attributes:
        server: it.
        target: host and port.
    """

    server: Running
    target: str

    def channel(self) -> grpc.Channel:
        """Returns a channel of the test's own."""
        return grpc.insecure_channel(self.target, raw.OPTIONS)

    def client(self, token: str | None = TOKEN) -> topkd.Client:
        """Returns a client."""
        return topkd.Client(self.target, token=token, attach_timeout=10)


@pytest.fixture(scope="module")
def plain(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    token_file = tmp_path_factory.mktemp("tcp") / "token"
    token_file.write_text(f"{TOKEN}\n")
    target = f"127.0.0.1:{processes.free_port()}"
    return Plain(launch(tcp=target, tcp_token_file=token_file), target)


@pytest.fixture(scope="module")
def client(plain: Plain) -> Iterator[topkd.Client]:
    with plain.client() as attached:
        yield attached


@pytest.fixture(scope="module")
def token(plain: Plain) -> Iterator[str]:
    """The token of a session that was attached by hand."""
    with plain.channel() as channel:
        stream = control_pb2_grpc.ControlServiceStub(channel).Attach(
            control_pb2.AttachRequest(client_name="by hand"), metadata=(("topkd-attach-token", TOKEN),)
        )
        first = next(stream)
        assert first.WhichOneof("event") == "session"
        assert not first.session.data_address
        yield first.session.token
        stream.cancel()


@pytest.fixture(scope="module")
def local_token(plain: Plain) -> Iterator[str]:
    """The token of a session of this host: none over TCP."""
    with raw.attached(plain.server.socket_dir) as local:
        yield local.session.token


def works(client: topkd.Client) -> None:
    scores = answers.rows(1, 4, 700)
    assert np.array_equal(client.select_topk(scores, 50, **UNIQUE).indices, best(scores, 50))


def test_selections_and_merges(client: topkd.Client) -> None:
    works(client)
    inputs = [answers.rows(seed, 2, 100 + seed) for seed in range(8)]
    results = client.select_topk_batch([topkd.Selection(scores, 9, values=True, **UNIQUE) for scores in inputs])
    for scores, result in zip(inputs, results, strict=True):
        assert np.array_equal(result.indices, best(scores, 9))
        assert np.array_equal(result.values, np.take_along_axis(scores, result.indices, 1))
    merged = client.merge_topk(inputs[0], np.arange(200, dtype=np.int64).reshape(2, 100), 5, **UNIQUE)
    assert np.array_equal(merged.indices, best(inputs[0], 5) + np.array([[0], [100]]))


def test_given_outputs_are_filled(client: topkd.Client) -> None:
    scores, out = answers.rows(2, 3, 400), np.full((3, 20), -7, np.int32)
    assert client.select_topk(scores, 20, out_indices=out, **UNIQUE).indices is out
    assert np.array_equal(out, best(scores, 20))


@pytest.mark.parametrize("given", [(), ("out_indices",), ("out_values",), ("out_indices", "out_values")])
def test_given_outputs_without_rows_come_back(client: topkd.Client, given: tuple[str, ...]) -> None:
    outputs = {"out_indices": np.empty((0, 3), np.int32), "out_values": np.empty((0, 3), np.float32)}
    out = {name: outputs[name] for name in given}
    scores, ids = np.zeros((0, 5), np.float32), np.zeros((0, 5), np.int32)
    for result in (client.select_topk(scores, 3, values=True, **out), client.merge_topk(scores, ids, 3, **out)):
        assert (result.indices.shape, result.indices.dtype) == ((0, 3), np.int32)
        assert (result.values.shape, result.values.dtype) == ((0, 3), np.float32)
        assert all(getattr(result, name.removeprefix("out_")) is array for name, array in out.items())


def test_a_client_of_numpy_arrays_needs_no_torch(plain: Plain) -> None:
    """In a process of its own: this one has imported torch."""
    program = (
        "import sys, numpy, topkd\n"
        "for target, token in ((sys.argv[1], None), (sys.argv[2], sys.argv[3])):\n"
        "    with topkd.Client(target, token=token, attach_timeout=30) as client:\n"
        "        scores, out = numpy.eye(3, 5, dtype=numpy.float32), numpy.zeros((3, 2), numpy.int32)\n"
        "        result = client.select_topk(scores, 2, order='value', ties='lowest', out_indices=out)\n"
        "        assert result.indices is out and out.tolist() == [[0, 1], [1, 0], [2, 0]], out\n"
        "assert 'torch' not in sys.modules\n"
    )
    arguments = [str(plain.server.socket_dir), plain.target, TOKEN]
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr.decode()


def test_there_is_no_memory_to_share(client: topkd.Client) -> None:
    with pytest.raises(topkd.RegionError, match="TCP"):
        client.empty((4, 4), "float32")
    with pytest.raises(topkd.TopkdError):
        client.plan(np.ones((1, 4), np.float32), 1)


def test_information_and_gauges(plain: Plain, client: topkd.Client) -> None:
    assert client.info().device.backend is topkd.Backend.CPU
    with plain.client() as other:
        works(other)
        now = client.info().sessions
        scrape.wait_for(plain.server.metrics_port, {"topkd_sessions": now}, transport="tcp")
    scrape.wait_for(plain.server.metrics_port, {"topkd_sessions": now - 1}, transport="tcp")


def test_errors_keep_their_class_and_place(client: topkd.Client) -> None:
    scores = np.ones((2, 8), np.float32)
    with pytest.raises(topkd.ArgumentValueError) as raised:
        client.select_topk_batch([topkd.Selection(scores, 1), topkd.Selection(scores, 1, group=3)])
    assert (raised.value.argument, raised.value.selection) == ("group", 1)


@pytest.mark.parametrize("wrong", [None, "A" * len(TOKEN), TOKEN[:-1], TOKEN + "A", TOKEN.swapcase(), ""])
def test_attaching_needs_the_attach_token(plain: Plain, wrong: str | None) -> None:
    with plain.client(wrong) as stranger, pytest.raises(topkd.AuthenticationError):
        stranger.connect()
    metadata = () if wrong is None else (("topkd-attach-token", wrong),)
    with plain.channel() as channel:
        got = ATTACH.call(channel, metadata)
    assert isinstance(got, Refusal)
    assert (got.code, got.reason) == ("UNAUTHENTICATED", "TOKEN_INVALID")


@pytest.mark.parametrize("kind", list(access.wrong_credentials("x", "y")))
def test_no_method_without_the_token(plain: Plain, token: str, local_token: str, kind: str) -> None:
    metadata = access.wrong_credentials(token, local_token)[kind]
    with plain.channel() as channel:
        for method in (*METHODS, REFLECTION):
            got = method.call(channel, metadata)
            assert isinstance(got, Refusal), f"{method.path} answered a stranger"
            assert got.code == "UNAUTHENTICATED", (method.path, got)


def test_the_attach_token_is_no_session(plain: Plain) -> None:
    with plain.channel() as channel:
        for method in METHODS:
            got = method.call(channel, (("topkd-token", TOKEN),))
            assert isinstance(got, Refusal)
            assert got.code == "UNAUTHENTICATED", (method.path, got)


def test_wrong_requests_are_refused_through_the_front(plain: Plain, token: str) -> None:
    metadata = (("topkd-token", token),)
    nowhere = selection_pb2.Selection(input=raw.placed(1, 0, (1, 4)), k=1)
    short = selection_pb2.Selection(input=raw.inline(np.ones((1, 4), np.float32)), k=1)
    short.input.shape[1] = 5
    memory = selection_pb2.CudaIpcMemory(handle=bytes(64), size=1 << 21, device_uuid="GPU-0")
    region = selection_pb2.RegisterRegionRequest(cuda_ipc=memory)
    with plain.channel() as channel:
        stub = selection_pb2_grpc.SelectionServiceStub(channel)
        got = refused(stub.SelectTopK, raw.batch(nowhere), metadata=metadata)
        assert (got.code, got.reason, got.fields) == ("NOT_FOUND", "REGION_NOT_FOUND", ("items[0].selection.input",))
        got = refused(stub.SelectTopK, raw.batch(short), metadata=metadata)
        assert (got.code, got.fields) == ("INVALID_ARGUMENT", ("items[0].selection.input",))
        got = refused(stub.RegisterRegion, region, metadata=metadata)
        assert (got.code, got.reason) == ("FAILED_PRECONDITION", "DEVICE_MISMATCH")
        for method in METHODS:
            rubbish = method.call(channel, (*metadata, ("topkd-attach-token", TOKEN)), b"\xff" * 16)
            if isinstance(rubbish, bytes):  # a stream says it of the call alone, and goes on
                assert method.path.endswith("/SelectTopKStream")
                error = selection_pb2.SelectTopKStreamResponse.FromString(rubbish).error
                assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (method.path, error)
                continue
            assert isinstance(rubbish, Refusal)
            assert rubbish.code == "INVALID_ARGUMENT", (method.path, rubbish)


def test_health_and_reflection(plain: Plain, token: str) -> None:
    with plain.channel() as channel:
        assert health(channel) == "SERVING"
        got = REFLECTION.call(channel, (("topkd-token", token),), b"\x3a\x00")
    assert isinstance(got, bytes)
    assert b"topkd.v1.SelectionService" in got


def test_the_lease_is_the_stream(plain: Plain) -> None:
    before = scrape.total(plain.server.metrics(), "topkd_sessions", transport="tcp")
    with plain.channel() as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        stream = stub.Attach(control_pb2.AttachRequest(), metadata=(("topkd-attach-token", TOKEN),))
        metadata = (("topkd-token", next(stream).session.token),)
        request = control_pb2.GetServerInfoRequest()
        stub.GetServerInfo(request, metadata=metadata, timeout=raw.TIMEOUT)
        stream.cancel()
        scrape.wait_for(plain.server.metrics_port, {"topkd_sessions": before}, 2.0, transport="tcp")
        assert refused(stub.GetServerInfo, request, metadata=metadata).code == "UNAUTHENTICATED"


def test_a_lost_worker_is_named_and_replaced(plain: Plain) -> None:
    """The last of the module: it takes the worker from every session over TCP."""
    with plain.client() as client:
        works(client)
        (worker,) = plain.server.shared()
        processes.kill(worker)
        with pytest.raises(topkd.SessionLostError):
            _work_forever(client)
        processes.wait_until(lambda: _tries(client), 60, "the client works again")


def _work_forever(client: topkd.Client) -> None:
    while True:
        works(client)


def _tries(client: topkd.Client) -> bool:
    try:
        works(client)
    except topkd.UnavailableError:
        return False
    return True


def test_full_queues_of_some_sessions_let_the_others_be_refused_at_once(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    target = f"127.0.0.1:{processes.free_port()}"
    limits = {"sessions": 3, "queue": 8, "streams": 1}
    launch(tcp=target, tcp_token_file=tmp_path / "token", limits=limits)
    large = inline_request(np.random.default_rng(1).permutation(8_000_000).astype(np.float32)[None])
    small = inline_request(np.ones((1, 4), np.float32))
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(by_hand(target)) for _ in range(3))
        busy = [first(large) for _ in range(8)]
        waiting = [session(small) for session in (second, third) for _ in range(8)]
        time.sleep(0.2)  # the calls of a channel are sent one after another
        excess = [third(small) for _ in range(4)]
        processes.wait_until(lambda: all(call.done() for call in excess), 10, "what is too much is answered")
        assert not busy[-1].done(), "the long calls were to be running still: make them longer"
        for call in excess:
            assert raw.refusal(call.exception()).reason == "QUEUE_FULL"
        for call in (*busy, *waiting):
            assert call.result()


def inline_request(scores: np.ndarray[Any, Any]) -> selection_pb2.SelectTopKRequest:
    options: dict[str, Any] = {"order": selection_pb2.ORDER_VALUE, "ties": selection_pb2.TIES_LOWEST}
    return raw.batch(selection_pb2.Selection(input=raw.inline(scores), k=2, **options))


@contextlib.contextmanager
def by_hand(target: str) -> Iterator[Callable[[selection_pb2.SelectTopKRequest], Any]]:
    """Attaches, and gives a function that begins a call of the session."""
    with grpc.insecure_channel(target, raw.OPTIONS) as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        stream = control.Attach(control_pb2.AttachRequest(), metadata=(("topkd-attach-token", TOKEN),))
        metadata = (("topkd-token", next(stream).session.token),)
        select = selection_pb2_grpc.SelectionServiceStub(channel).SelectTopK
        yield lambda request: select.future(request, metadata=metadata, timeout=60)
        stream.cancel()


def test_tls_with_a_token_and_with_certificates(launch: Launch, tmp_path: Path) -> None:
    """One server that asks for certificates, and one that takes the token under TLS."""
    server, engine, other = (certificates.make(tmp_path, name) for name in ("server", "engine", "other"))
    (tmp_path / "token").write_text(TOKEN)
    authority = server.certificate.read_bytes()
    own: dict[str, Any] = {"tls_cert": server.certificate, "tls_key": server.key}

    def options(key: certificates.Certificate | None) -> topkd.TlsOptions:
        if key is None:
            return topkd.TlsOptions(ca=authority)
        return topkd.TlsOptions(ca=authority, certificate=key.certificate.read_bytes(), key=key.key.read_bytes())

    target = f"127.0.0.1:{processes.free_port()}"
    running = launch(tcp=target, tcp_token_file=tmp_path / "token", **own)
    with topkd.Client(target, token=TOKEN, tls=options(None)) as client:
        works(client)
    with topkd.Client(target, token="B" * 32, tls=options(None)) as client, pytest.raises(topkd.AuthenticationError):
        client.connect()
    for wrong in (None, topkd.TlsOptions(ca=other.certificate.read_bytes())):
        with (
            topkd.Client(target, token=TOKEN, tls=wrong, attach_timeout=1) as client,
            pytest.raises(topkd.UnavailableError),
        ):
            client.connect()
    running.stop()

    target = f"127.0.0.1:{processes.free_port()}"
    running = launch(tcp=target, tls_client_ca=engine.certificate, **own)
    with topkd.Client(target, tls=options(engine)) as client:
        works(client)
    for stranger in (None, other):
        with (
            topkd.Client(target, tls=options(stranger), attach_timeout=1) as client,
            pytest.raises(topkd.UnavailableError),
        ):
            client.connect()
    running.stop()
