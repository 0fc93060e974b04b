from pathlib import Path

import pytest

from topkd.server._front_endpoints import read_attach_token
from topkd.server._tokens import digest
from topkd.server.config import ConfigError, ServerConfig, ServerLimits, is_loopback, split_address

TOKEN = Path("/token")


def test_environment_is_read_and_given_options_win() -> None:
    env = {"TOPKD_DEVICE": "cpu", "TOPKD_LIMIT_SESSIONS": "3", "TOPKD_ALLOWED_UIDS": "1,2", "TOPKD_METRICS_PORT": "off"}
    config = ServerConfig.from_environment(env, device="cuda:1", max_queue=7, spares=None)
    assert config.device == "cuda:1"
    assert config.limits.max_sessions == 3
    assert config.limits.max_queue == 7
    assert config.limits.max_plans == ServerLimits().max_plans
    assert config.allowed_uids == (1, 2)
    assert config.metrics_port is None
    assert config.spares == 1


def test_metrics_can_be_switched_off_in_code() -> None:
    assert ServerConfig.from_environment({}, metrics_port="off").metrics_port is None


def test_unreadable_variable_names_the_option() -> None:
    with pytest.raises(ConfigError, match="spares"):
        ServerConfig.from_environment({"TOPKD_SPARES": "many"})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "GPU-1a2b"])
def test_devices(device: str) -> None:
    ServerConfig(device=device).check()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "gpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"spares": 0}, "spares"),
        ({"cpu_threads": 0}, "cpu_threads"),
        ({"drain_grace_s": -1.0}, "drain_grace_s"),
        ({"drain_grace_s": float("nan")}, "drain_grace_s"),
        ({"metrics_port": 65536}, "metrics_port"),
        ({"log_level": "loud"}, "log_level"),
        ({"log_format": "xml"}, "log_format"),
        ({"socket_dir": Path("/" + "x" * 100)}, "socket_dir"),
        ({"limits": ServerLimits(max_queue=0)}, "max_queue"),
        ({"limits": ServerLimits(max_batch=1 << 31)}, "max_batch"),
        ({"tcp_address": "127.0.0.1:1"}, "tcp_token_file"),
        ({"tcp_address": "nonsense", "tcp_token_file": TOKEN}, "tcp_address"),
        ({"tcp_address": "0.0.0.0:1", "tcp_token_file": TOKEN}, "not loopback"),
        ({"tcp_address": "127.0.0.1:1", "tcp_token_file": TOKEN, "tls_cert": TOKEN}, "tls_key"),
        ({"tcp_address": "127.0.0.1:1", "tls_client_ca": TOKEN}, "tls_client_ca"),
    ],
)
def test_refusals_name_the_option(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerConfig(**options).check()  # type: ignore[arg-type]


def test_insecure_tcp_only_if_allowed() -> None:
    ServerConfig(tcp_address="0.0.0.0:1", tcp_token_file=TOKEN, allow_insecure_tcp=True).check()
    ServerConfig(tcp_address="0.0.0.0:1", tcp_token_file=TOKEN, tls_cert=TOKEN, tls_key=TOKEN).check()


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("localhost:0") == ("localhost", 0)
    assert is_loopback("127.9.9.9")
    assert is_loopback("::1")
    assert not is_loopback("example.org")
    assert not is_loopback("0.0.0.0")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 32, "é".encode() * 16, b"0123456789\n0123456789"])
def test_a_file_without_a_token_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    config = ServerConfig(tcp_address="127.0.0.1:0", tcp_token_file=path)
    with pytest.raises(ConfigError, match=str(path)):
        read_attach_token(config)
    path.write_bytes(b" 0123456789abcdef\n")
    assert read_attach_token(config) == digest("0123456789abcdef")
