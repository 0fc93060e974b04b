from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Server
from topkd import kernels
from topkd._cli_common import CommandError, size
from topkd._cli_serve import options
from topkd.cli import build_parser, main

HERE_TOO_LONG = 60


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "topkd", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=HERE_TOO_LONG,
        env=environment or None,
    )


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    path = tmp_path / "scores.npy"
    np.save(path, np.array([[1, 9, 3, 7], [4, 0, 8, 6]], np.float32))
    return path


def serve_options(*arguments: str) -> dict[str, object]:
    return options(build_parser().parse_args(["serve", *arguments]))


def test_serve_passes_on_only_what_is_given() -> None:
    assert serve_options() == {}


def test_serve_passes_on_every_option() -> None:
    given = serve_options(
        *("--device", "cpu", "--socket-dir", "/s", "--allow-uid", "7", "--allow-uid", "8", "--allow-gid", "9"),
        *("--spares", "2", "--cpu-threads", "1", "--drain-seconds", "0.5"),
        *("--limit", "sessions=4", "--limit", "max_batch=5"),
        *("--tcp", "127.0.0.1:0", "--tcp-token-file", "/t", "--tls-cert", "/c", "--tls-key", "/k"),
        *("--tls-client-ca", "/a", "--allow-insecure-tcp"),
        *("--metrics-host", "::1", "--metrics-port", "off", "--log-level", "debug", "--log-format", "console"),
    )
    assert given == {
        "device": "cpu",
        "socket_dir": Path("/s"),
        "allowed_uids": (7, 8),
        "allowed_gids": (9,),
        "spares": 2,
        "cpu_threads": 1,
        "drain_grace_s": 0.5,
        "max_sessions": 4,
        "max_batch": 5,
        "tcp_address": "127.0.0.1:0",
        "tcp_token_file": Path("/t"),
        "tls_cert": Path("/c"),
        "tls_key": Path("/k"),
        "tls_client_ca": Path("/a"),
        "allow_insecure_tcp": True,
        "metrics_host": "::1",
        "metrics_port": "off",
        "log_level": "debug",
        "log_format": "console",
    }


def test_serve_passes_on_every_field_of_the_configuration() -> None:
    """A field without an option would be out of reach on the command line."""
    config = pytest.importorskip("topkd.server.config")
    parser = build_parser()
    known = vars(parser.parse_args(["serve"])).keys()
    out_of_reach = {
        "limits",
        "session_grace_s",
        "start_timeout_s",
        "attach_timeout_s",
        "front_timeout_s",
    }  # by the environment only
    assert set(config.ServerConfig.__dataclass_fields__) - known == out_of_reach


@pytest.mark.parametrize("text", ["sessions", "sessions=", "sessions=many", "sessions=-1", "=4"])
def test_serve_refuses_a_limit_that_cannot_be_read(text: str) -> None:
    with pytest.raises(CommandError, match="NAME=N"):
        serve_options("--limit", text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "wishes=3"], "there is no such limit; there are sessions, regions"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--tcp", "0.0.0.0:1"], "tcp_token_file"),
        (["--limit", "sessions"], "NAME=N"),
        (["--metrics-port", "99999"], "metrics_port is 99999"),
        (["--device", "cpu", "--devices", "cpu:2"], "exclude each other"),
    ],
)
def test_serve_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_serve_names_the_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("topkd.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "structlog", None)
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    assert main(["serve"]) == 1
    assert "pip install 'topkd[server]'" in capsys.readouterr().err


def test_health_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--target", str(tmp_path), "--timeout", "0.5"]) == 1
    assert capsys.readouterr().out.startswith(f"UNREACHABLE: no server at {tmp_path}/grpc.sock: ")
    assert main(["health", "--target", str(tmp_path), "--timeout", "0.5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "UNREACHABLE"


def test_info_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--target", str(tmp_path), "--timeout", "0.5"]) == 1
    assert "no server at" in capsys.readouterr().err
    assert main(["info", "--target", str(tmp_path), "--timeout", "0.5", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "UnavailableError"
    assert "no server at" in error["message"]


def test_health_of_a_server(server: Server) -> None:
    done = run("health", "--target", str(server.socket_dir), "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"status": "SERVING", "detail": ""})


def test_info_of_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--timeout", "60", "--target", str(server.socket_dir), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["device"]["backend"] == "cpu"
    assert {"name": "torch", "dtypes": ["bfloat16", "float16", "float32"]} in info["kernels"]
    assert info["limits"]["max_batch"] > 0
    assert main(["info", "--timeout", "60", "--target", str(server.socket_dir)]) == 0
    assert "backend" in capsys.readouterr().out


def test_the_default_server_is_found_by_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_SOCKET_DIR", str(server.socket_dir))
    assert main(["health"]) == 0


@pytest.mark.parametrize("command", ["info", "health"])
def test_info_and_health_do_without_torch(server: Server, command: str) -> None:
    program = (
        "import sys\nfrom topkd.cli import main\n"
        f"assert main([{command!r}, '--target', {str(server.socket_dir)!r}]) == 0\n"
        "assert not {'torch', 'structlog', 'prometheus_client'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["--local", "--target"])
def test_select(where: str, scores: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--local"]
    if where == "--target":  # a second session may have to wait for its worker, on a busy machine for long
        place = ["--timeout", "60", where, str(request.getfixturevalue("server").socket_dir)]
    assert main(["select", str(scores), "-k", "3", "--order", "value", "--values", "--json", *place]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["indices"] == [[1, 3, 2], [2, 3, 0]]
    assert answer["values"] == [[9, 7, 3], [8, 6, 4]]
    assert main(["select", str(scores), "-k", "3", "--smallest", "--order", "value", "--lengths", "2,4", *place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["0", "2", "0", "1", "-1"]
    assert lines[3].split() == ["1", "3", "1", "0", "3"]


def test_select_reads_bit_patterns_and_lengths_of_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "rows.npz", tmp_path / "out.npz"
    bits = (np.array([[1, 2, 3, 4]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    np.savez(path, scores=bits, lengths=np.array([3]))
    arguments = ["-k", "2", "--dtype", "bfloat16", "--lengths", "lengths", "--values", "--order", "value", "--local"]
    assert main(["select", str(path), *arguments, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == [[3.0, 2.0]]
    with np.load(out) as written:
        assert written["indices"].tolist() == [[2, 1]]
        assert written["values"].dtype == np.float32


def test_select_writes_what_json_cannot_hold_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([np.nan, np.inf], np.float32))
    assert main(["select", str(path), "-k", "3", "--values", "--order", "value", "--local", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["values"] == [["nan", "inf", "-inf"]]
    assert printed["kernel"] in kernels.kernels(), "the family that ran, not what was asked for"


def archive(folder: Path, **arrays: object) -> str:
    path = folder / "a.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize(
    ("arrays", "arguments", "said"),
    [
        ({"a": np.zeros((2, 3)), "b": np.zeros((2, 3))}, [], "choose with --array, of a, b"),
        ({"a": np.zeros((2, 3))}, ["--array", "c"], "has no array c; it has a"),
        ({"a": np.zeros((2, 3))}, [], "is of float64"),
        ({"a": np.zeros((2, 3), np.uint16)}, [], "with --dtype"),
        ({"a": np.zeros((2, 3), np.uint32)}, ["--dtype", "bfloat16"], "is of uint32"),
        ({"a": np.zeros((2, 3, 4), np.float32)}, [], "has 3 dimensions"),
        ({"a": np.zeros((2, 3), np.float32)}, ["--lengths", "1,2,3"], "3 lengths for 2 rows"),
        ({"a": np.zeros((2, 3), np.float32)}, ["--lengths", "some"], "must be integers, or an array"),
        ({"a": np.zeros((2, 3), np.float32)}, ["--group", "3"], "group"),
        ({"a": np.zeros((2, 3), np.float32)}, ["--kernel", "magic"], "magic"),
        ({"a": np.array([[object()]])}, [], "of plain numbers"),
        ({}, [], "holds no array"),
    ],
)
def test_select_says_what_is_wrong(
    arrays: dict[str, object],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["select", archive(tmp_path, **arrays), "-k", "2", "--local", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), (b"no numbers", "no .npy or .npz file")])
def test_select_says_what_is_wrong_with_the_file(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.npy"
    if content is not None:
        path.write_bytes(content)
    assert main(["select", str(path), "-k", "2", "--local"]) == 1
    assert said in capsys.readouterr().err


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 140] ^= 0xFF
    path.write_bytes(data)


def _huge(path: Path) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50, 8)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)


def _no_numpy(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archived:
        archived.writestr("readme.txt", "none")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(_cut, "damaged"), (_flip, "damaged"), (_huge, "more than the memory"), (_no_numpy, "no array")],
)
def test_select_of_a_damaged_file(
    damage: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(archive(tmp_path, a=np.ones((2, 8), np.float32)))
    damage(path)
    assert main(["select", str(path), "-k", "2", "--local"]) == 1
    assert said in capsys.readouterr().err


def test_select_leaves_out_what_is_no_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = archive(tmp_path, a=np.ones((2, 8), np.float32))
    with zipfile.ZipFile(path, "a") as archived:
        archived.writestr("readme.txt", "about the array")
    out = tmp_path / "answer"
    assert main(["select", path, "-k", "2", "--local", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert np.load(out)["indices"].shape == (2, 2)


def test_a_token_file_of_other_bytes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff" * 32)
    assert main(["info", "--target", "127.0.0.1:1", "--token-file", str(path)]) == 1
    assert "printable ASCII" in capsys.readouterr().err


def test_wrong_usage_is_status_2() -> None:
    assert run("select").returncode == 2
    assert run().returncode == 2


def test_no_progress_unless_on_a_terminal(scores: Path) -> None:
    done = run("select", str(scores), "-k", "1", "--local")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 bytes"), (1536, "1.5 KiB"), (141 << 30, "141.0 GiB"), (1 << 41, "2.0 TiB")]
)
def test_sizes_for_people(count: int, shown: str) -> None:
    assert size(count) == shown
