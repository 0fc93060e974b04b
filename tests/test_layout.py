"""What the wheel holds, and which part imports which."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

import topkd

ROOT = Path(str(topkd.__file__)).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
FOR_TORCH = "torch_ops.py"
"""The one module of the client that needs torch at its import, so that nothing of the client imports it."""

BESIDE_THE_SOURCES = {"client", "server", "kernels", "proto", "tests"}


def imports(path: str) -> Iterator[tuple[str, bool]]:
    """Yield what a file imports, as absolute names, and whether it does at its own import."""
    tree = ast.parse((ROOT / path).read_text())
    package = ("topkd", *Path(path).parent.parts)
    at_import = {id(node) for top in tree.body for node in walk_unguarded(top)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in at_import


def walk_unguarded(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when the module is imported: not functions, not `if TYPE_CHECKING`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from walk_unguarded(child)


def part(name: str) -> str:
    """Say which part of the package an absolute name or a path belongs to."""
    pieces = name.removeprefix("topkd.").replace("/", ".").split(".")
    return pieces[0] if pieces[0] in ("kernels", "server", "v1") else "client"


@pytest.mark.parametrize("path", FILES)
def test_nothing_imports_by_the_names_of_the_source_folders(path: str) -> None:
    assert not [name for name, _ in imports(path) if name.split(".")[0] in BESIDE_THE_SOURCES]


@pytest.mark.parametrize("path", FILES)
def test_imports_follow_the_arrows(path: str) -> None:
    """client -> v1, and -> kernels lazily; server -> v1, kernels, client; kernels -> nothing."""
    own = part(path)
    for name, at_import in imports(path):
        if name.split(".")[0] != "topkd":
            continue
        target = part(name)
        if own in ("kernels", "v1"):
            assert target == own, f"{path} imports {name}"
        elif own == "client":
            lazily = {"kernels", "server"} if path.startswith(("_cli_", "_doctor")) else {"kernels"}
            now = path == FOR_TORCH and target == "kernels"
            assert target in {"client", "v1"} or now or (target in lazily and not at_import), f"{path} imports {name}"
            assert name.split(".")[:2] != ["topkd", "torch_ops"], f"{path} imports {name}"


@pytest.mark.parametrize("path", [path for path in FILES if part(path) == "client" and path != FOR_TORCH])
def test_the_client_imports_neither_torch_nor_the_server_extra_at_import(path: str) -> None:
    heavy = {"torch", "cutlass", "cuda", "prometheus_client", "structlog", "grpc_health", "grpc_reflection"}
    assert not [name for name, at_import in imports(path) if at_import and name.split(".")[0] in heavy]


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    files = [str(file) for file in importlib.metadata.files("topkd") or ()]
    tops = {name.split("/")[0] for name in files if not name.startswith("../")}
    assert tops == {"topkd", f"topkd-{topkd.__version__}.dist-info"}
    for name in (
        "topkd/py.typed",
        "topkd/kernels/measured.csv",
        "topkd/v1/tensor.proto",
        "topkd/v1/tensor_pb2.pyi",
        "topkd/server/worker.py",
        "topkd/server/static/status.js",
        "topkd/server/static/uplot.LICENSE",
    ):
        assert name in files
    assert f"topkd-{topkd.__version__}.dist-info/licenses/LICENSE" in files
    assert not [name for name in files if "test" in name or name.endswith((".binpb", ".npz"))]


def test_the_console_script_is_the_command() -> None:
    [script] = [one for one in importlib.metadata.entry_points(group="console_scripts") if one.name == "topkd"]
    assert script.value == "topkd.cli:main"
