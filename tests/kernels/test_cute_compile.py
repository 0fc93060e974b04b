"""What is compiled once and then loaded: keys, processes, a compiler that fails, and compiling ahead of time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from topkd import kernels
from topkd.cli import main
from topkd.kernels import _cute_cache, _cute_compile, _cute_key, _cute_link, _dispatch
from topkd.kernels._cute_cache import Store, open_store
from topkd.kernels._cute_key import Variant, fingerprint, key_of, sources

VARIANT = Variant("radix_wide_kernel", "RadixWide", ("bfloat16", False), "sm_90a")
KEY = "0" * 64
compiler = pytest.mark.skipif(not _cute_compile.installed(), reason="needs nvidia-cutlass-dsl")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and nothing warned of, counted or failed."""
    monkeypatch.setenv("TOPKD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TOPKD_PRECOMPILED_DIR", raising=False)
    monkeypatch.setattr(_cute_cache, "_WARNED", set())
    monkeypatch.setattr(_cute_compile, "_FAILURES", {})
    monkeypatch.setattr(_cute_compile, "_COUNTS", _cute_compile.Counter())


def put(store: Store, library: bytes = b"library", key: str = KEY) -> Path:
    entry = store.store(VARIANT, key, library, b"binary", {"threads": 512})
    assert entry is not None
    return entry.path


def test_the_sources_of_a_kernel_are_its_device_files() -> None:
    assert {"radix_wide_kernel", "radix_wide_list", "_cute_rows", "_cute_ops", "_cute_flags"} <= set(
        sources("radix_wide_kernel")
    )
    assert "radix_wide" not in sources("radix_wide_kernel")
    assert fingerprint("radix_wide_kernel") != fingerprint("_cute_rows")


@compiler
@pytest.mark.parametrize(
    "module",
    ["radix_wide_kernel", "split_merge_kernel", "cluster_kernel", "radix_register_kernel", "small_kernel"],
)
def test_the_sources_of_a_kernel_are_what_python_imports_for_it(module: str) -> None:
    code = (
        "import sys, importlib, topkd.kernels as k; before = set(sys.modules); "
        f"importlib.import_module('topkd.kernels.{module}'); "
        "print(*(n.rpartition('.')[2] for n in sys.modules if n.startswith('topkd.kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    ours = set(done.stdout.split())
    found = set(sources(module))
    assert found <= ours
    device = {name for name in ours if name.startswith(module.removesuffix("kernel"))}
    assert device <= found
    assert {"_cute_ops", "_cute_rows", "_cute_flags"} <= found


@compiler
def test_a_key_depends_on_all_that_changes_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        key_of(VARIANT),
        key_of(VARIANT._replace(arch="sm_80")),
        key_of(VARIANT._replace(facts=("bfloat16", True))),
        key_of(VARIANT._replace(facts=("bfloat16", 0))),
        key_of(VARIANT._replace(options="--opt-level 2")),
        key_of(VARIANT._replace(name="Other")),
        key_of(VARIANT._replace(module="cluster_kernel")),
    }
    assert len(keys) == 7
    assert key_of(VARIANT) in keys
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert key_of(VARIANT) not in keys
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setattr(_cute_key, "versions", lambda: ("nvidia-cutlass-dsl 99",))
    assert key_of(VARIANT) not in keys
    monkeypatch.undo()
    monkeypatch.setattr(_cute_key, "fingerprint", lambda _: "changed")
    assert key_of(VARIANT) not in keys


LOADS = """
import json, sys
from topkd.kernels import _cute_compile as compiling, _cute_launch
made = compiling.load_or_compile("radix_wide_kernel", "RadixWide", ("bfloat16", False), "sm_90a")
try:
    made.function(*[0] * (len(_cute_launch._FIELDS) - 9), *[1] * 9, 0)  # addresses and such; sizes; the stream
    called = "launched"
except Exception as error:
    called = str(error)
print(json.dumps([made.source, made.seconds, len(made.binary), "cutlass" in sys.modules, called]))
"""


def load_in_a_process() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", LOADS], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> list[object]:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    reply: list[object] = json.loads(out.splitlines()[-1])
    return reply


@compiler
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_two_processes_compile_once_and_a_third_loads_without_the_compiler(tmp_path: Path) -> None:
    both = [answer(process) for process in [load_in_a_process(), load_in_a_process()]]
    assert sorted(str(reply[0]) for reply in both) == ["cache", "compiled"]
    source, seconds, size, imported, called = answer(load_in_a_process())
    assert (source, imported) == ("cache", False)
    assert isinstance(seconds, float)
    assert seconds < 2  # milliseconds; but this machine may be busy
    assert size == both[0][2] != 0
    if not torch.cuda.is_available():
        assert "Cuda" in str(called), "the call goes through to CUDA, which says that there is no device"
    (path,) = (tmp_path / "cache").glob("*.so")
    path.write_bytes(path.read_bytes()[:-3])
    assert answer(load_in_a_process())[0] == "compiled", "a broken entry is a miss"
    assert answer(load_in_a_process())[0] == "cache", "and is replaced"


@compiler
@pytest.mark.filterwarnings("default")
def test_a_library_that_cannot_be_loaded_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    put(store, b"no library", key_of(VARIANT))
    compiled = _cute_compile._Compiled(print, b"", b"binary", {})
    monkeypatch.setattr(_cute_compile, "_compile", lambda _: compiled)
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        made = _cute_compile.load_or_compile(*VARIANT)
    assert made.source == "compiled"
    assert kernels.compiles() == {("radix_wide", "compiled"): 1}


@compiler
def test_without_a_linker_kernels_are_compiled_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cute_link, "linker", lambda: None)
    monkeypatch.setattr(_cute_compile, "_compile", lambda _: _cute_compile._Compiled(print, b"object", b"", {}))
    with pytest.warns(RuntimeWarning, match="no linker"):
        assert _cute_compile.load_or_compile(*VARIANT).size == 0


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that cannot be imported."""

    def fail(_: object) -> None:
        raise ImportError("libcutlass is of another machine")

    monkeypatch.setattr(_cute_compile, "_compile", fail)
    monkeypatch.setattr(_cute_compile, "key_of", lambda _: KEY)


@pytest.mark.usefixtures("broken")
def test_a_compiler_that_fails_is_remembered() -> None:
    assert _cute_compile.failure("radix_wide") is None
    with pytest.raises(kernels.KernelUnavailableError, match="of another machine"):
        _cute_compile.load_or_compile(*VARIANT)
    assert "of another machine" in str(_cute_compile.failure("radix_wide"))
    assert kernels.compiles() == {}


class Cold:
    """A family like any other, on the CPU, whose code cannot be compiled."""

    name = "radix_wide"
    capturable = True
    oldest = (8, 0)

    def unmet(self, request: kernels.SelectRequest) -> str | None:
        return None

    def precompile(self, arch: str) -> None:
        _cute_compile.load_or_compile(*VARIANT)

    def warm(self, request: kernels.SelectRequest) -> None:
        _cute_compile.load_or_compile(*VARIANT)

    def run(self, jobs: object) -> None:
        _cute_compile.load_or_compile(*VARIANT)


@pytest.mark.usefixtures("broken")
def test_a_family_without_code_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_FAMILIES", (Cold(), _dispatch._FAMILIES[-1]))
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert kernels.choose(kernels.validate_select(scores, 1))[0] == "radix_wide"
    assert kernels.select_topk(scores, 1).indices.tolist() == [[1]], "the call itself is served by another"
    name, reason = kernels.choose(kernels.validate_select(scores, 1))
    assert name == "torch"
    assert "of another machine" in reason
    assert "no code" in str(kernels.supports("radix_wide", scores, 1))
    with pytest.raises(ValueError, match="no code"):
        kernels.select_topk(scores, 1, kernel="radix_wide")


@pytest.mark.usefixtures("broken")
def test_warming_passes_a_family_without_code_over_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_FAMILIES", (Cold(), _dispatch._FAMILIES[-1]))
    named = kernels.validate_select(torch.zeros(1, 3), 1, kernel="radix_wide")
    assert kernels.warm_select(kernels.validate_select(torch.zeros(1, 3), 1))[0] == "torch"
    with pytest.raises(kernels.KernelUnavailableError):
        kernels.warm_select(named)


def test_precompile_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="sm_90a"):
        kernels.precompile("sm_12")
    with pytest.raises(ValueError, match=r"'torch'.*radix_wide"):
        kernels.precompile("sm_90a", ["torch"])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            kernels.precompile()
    with pytest.raises(ValueError, match="jobs is 0"):
        kernels.precompile("sm_90a", jobs=0)
    monkeypatch.setattr("topkd.kernels._precompile.installed", lambda: False)
    with pytest.raises(RuntimeError, match="nvidia-cutlass-dsl"):
        kernels.precompile("sm_90a")


@compiler
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["precompile", "--arch", "sm_90a", "--family", "radix_wide", "--dir", str(tmp_path / "image"), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first) == 6
    assert {row["source"] for row in first} == {"compiled"}
    assert all(row["resources"]["threads"] == 1024 and 0 < row["resources"]["registers"] <= 64 for row in first)
    assert main([*command, "--jobs", "2"]) == 0
    output = capsys.readouterr()
    assert {row["source"] for row in json.loads(output.out)} == {"cache"}
    assert len(output.err.splitlines()) == 6
    assert not (tmp_path / "cache").exists()
    assert main(["precompile", "--list", "--dir", str(tmp_path / "image")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 7
    assert "registers" in table[0]
    assert all(line.endswith("current") for line in table[1:])


def test_the_command_lists_nothing_where_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["precompile", "--arch", "nvidia"]) == 2
    assert "sm_90a" in capsys.readouterr().err


def test_nothing_of_it_imports_the_compiler() -> None:
    code = "import sys; from topkd.kernels import _precompile; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@compiler
@pytest.mark.filterwarnings("error")
def test_warnings_of_the_compiler_are_no_errors_where_warnings_are() -> None:
    """The compiler deprecates what the kernels use; a process that turns warnings into errors has its kernels still."""
    facts = (1, True, "bfloat16", 1, False)
    assert callable(_cute_compile.compile_kernel("cluster_kernel", "ClusterSelect", facts, "sm_90a"))
