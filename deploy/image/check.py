"""Takes the image's build steps without Docker, starts the server from the result as the image does, and looks at it.

    python deploy/image/check.py [--kernels DIR] [--arch ARCH]...

The steps are those of the Dockerfile (deploy/image/steps), with a CPU build of torch. As root, the server runs as user
10001 on a read-only root with `/tmp` and the socket directory to write to, and an engine as another user with PID
numbers of its own and that directory read-only, as in another container; else both as the caller, which is said.
What it cannot show: the base image, CUDA's torch, a kernel on a GPU.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
USER = 10001
METRICS_PORT, HEALTH_PORT = 19477, 19479
START_TIMEOUT_S = 120.0
PROGRAM = """
import numpy as np, topkd
scores = np.random.default_rng(1).permutation(4096).reshape(4, 1024).astype(np.float32)
with topkd.Client() as client:
    shared = client.empty(scores.shape, "float32")
    shared[...] = scores
    answer = client.select_topk(shared, 8, order="value", ties="lowest")
assert np.array_equal(answer.indices, np.argsort(-scores, axis=1)[:, :8]), answer.indices
"""
FRONT = """
import sys
from topkd import cli
from topkd.server import _supervisor

command = _supervisor.Supervisor._command

def with_kernels(*arguments):
    python, _, _, *options = command(*arguments)
    return [python, "-c", {worker!r}, *options]

_supervisor.Supervisor._command = with_kernels
sys.exit(cli.main(sys.argv[1:]))
"""
WORKER = """
import os, sys
from pathlib import Path
from topkd import kernels
from topkd.server import _worker, worker

warm_up = _worker.warm_up

def with_kernels(*arguments):
    done = kernels.precompile({arch!r}, {families!r})
    Path(os.environ["TOPKD_SOCKET_DIR"], "kernels").write_text(str(len(done)))
    return warm_up(*arguments)

_worker.warm_up = with_kernels
sys.exit(worker.main(sys.argv[1:]))
"""
"""A worker that makes kernels of an architecture ready when it starts, as on a GPU, by the cache or the compiler."""
SMALLEST = "latch"
"""A family of one kernel, which is soon compiled."""


def say(text: str) -> None:
    """Shows what was found."""
    print(f"image-check: {text}", flush=True)


def steps(*arguments: object, **environ: str) -> None:
    """Takes one build step."""
    started = time.monotonic()
    subprocess.run([HERE / "steps", *map(str, arguments)], check=True, env=os.environ | environ)
    say(f"step {arguments[0]}: {time.monotonic() - started:.0f} s")


def build(folder: Path, seed: Path | None, archs: list[str]) -> None:
    """Makes the environment that runs, one with the compiler, and the kernels, as the Dockerfile's stages do."""
    sources = folder / "src"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        sources.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, sources)
    for name in ("client", "server", "kernels", "proto/topkd"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    steps("wheel", sources, folder / "dist", PYTHON=sys.executable)
    steps("install", folder / "topkd", folder / "dist", "cpu", PYTHON=sys.executable)
    shutil.copytree(folder / "topkd", folder / "with-compiler", symlinks=True)
    steps("compiler", folder / "with-compiler")
    if seed is not None and seed.is_dir():  # what was compiled of the same sources is not compiled again
        shutil.copytree(seed, folder / "kernels", ignore=shutil.ignore_patterns("locks", "*.tmp"))
    steps("kernels", folder / "with-compiler", folder / "kernels", *archs)


def settings(folder: Path) -> dict[str, str]:
    """Returns the environment of the image, its places moved into the folder."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found: dict[str, str] = {}
    for stage in ("base", "runtime", "gpu"):
        lines = text.split(f" AS {stage}\n")[1].split("\nFROM ")[0].splitlines()
        for line in lines:
            if line.startswith("ENV "):
                found |= dict(pair.split("=", 1) for pair in shlex.split(line[4:]))
    moved = {"/opt/topkd-kernels": "kernels", "/run/topkd": "run", "/opt/topkd": "topkd"}
    for name, value in found.items():
        for place, part in moved.items():
            value = value.replace(place, str(folder / part))
        found[name] = value.replace("$PATH", os.environ["PATH"])
    return found


def command() -> list[str]:
    """Returns the command line of the image."""
    text = (ROOT / "Dockerfile").read_text()
    entry, given = (
        json.loads(re.search(rf"^{name} (\[.*\])$", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD")
    )  # type: ignore[index]
    return [*entry, *given]


def may_confine() -> bool:
    """Says whether this user may make users, mounts and PID numbers for a process."""
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode == 0
    )


def confined(folder: Path, arguments: list[str], *, engine: bool = False) -> list[str]:
    """Returns a command that runs on a read-only root, without capabilities: as the image's user, or as an engine.

    An engine is another user of the image's group, with PID numbers of its own and the socket directory read-only.
    """
    prefix, hidden, sockets = Path(sys.base_prefix), folder / "python", folder / "run"
    hidden.mkdir(exist_ok=True)
    closed = next((path for path in reversed(prefix.parents) if not path.stat().st_mode & 0o001), None)
    script = ["set -eu"]
    if closed is not None:  # an interpreter where only root may look, as pyenv's
        script += [f"mount --bind {prefix} {hidden}", f"mount -t tmpfs -o mode=755 tmpfs {closed}"]
        script += [f"mkdir -p {prefix}", f"mount --bind {hidden} {prefix}"]
    script += [f"mount --bind {sockets} {sockets}", "mount -o remount,bind,ro /", "mount -t tmpfs tmpfs /tmp"]
    who = f"--reuid {USER} --regid {USER} --clear-groups"
    if engine:
        script += [f"mount -o remount,bind,ro {sockets}"]
        who = f"--reuid {USER + 1} --regid {USER + 1} --groups {USER}"
    script += [f"exec setpriv {who} --no-new-privs --bounding-set=-all {shlex.join(arguments)}"]
    spaces = ["--pid", "--fork", "--mount-proc"] if engine else []
    return ["unshare", "--mount", "--propagation", "private", *spaces, "sh", "-c", "\n".join(script)]


def check_kernels(folder: Path, environ: dict[str, str], archs: list[str]) -> None:
    """Loads every kernel without the compiler: none may be compiled."""
    python = folder / "topkd/bin/python"
    absent = subprocess.run([python, "-c", "import cutlass"], env=environ, capture_output=True, check=False)
    assert b"No module named 'cutlass'" in absent.stderr, "the compiler is in the image that runs"
    options = [option for arch in archs for option in ("--arch", arch)]
    asked = [python, "-m", "topkd", "precompile", "--json", "--dir", folder / "kernels", *options]
    rows = json.loads(
        subprocess.run(asked, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    )
    compiled = [row for row in rows if row["source"] != "cache"]
    assert rows, "there are no kernels"
    assert not compiled, compiled
    say(f"{len(rows)} kernels for {', '.join(archs)} loaded without the compiler, 0 compiled")


@contextlib.contextmanager
def serving(folder: Path, environ: dict[str, str], program: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server with the image's arguments, confined where that is possible; ends it, which must be in order.

    Args:
        folder: of the check.
        environ: of the server.
        program: what takes the arguments.
    """
    _, *given = command()
    options = [text.replace("0.0.0.0", "127.0.0.1").replace("9479", str(HEALTH_PORT)) for text in given]
    serve = [*program, *options, "--metrics-port", str(METRICS_PORT), "--device", "cpu", "--allow-gid", str(USER)]
    started = time.monotonic()
    server = subprocess.Popen(confined(folder, serve) if may_confine() else serve, env=environ)
    try:
        health = [folder / "topkd/bin/topkd", "health"]
        while subprocess.run(health, env=environ, capture_output=True, check=False).returncode:
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() - started < START_TIMEOUT_S, "the server is not healthy"
            time.sleep(0.2)
        say(f"SERVING after {time.monotonic() - started:.1f} s")
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(30)
    assert status == 0, f"the server ended with {status} on SIGTERM"


def check_server(folder: Path, environ: dict[str, str]) -> None:
    """Starts the server as the image does, selects, ends it."""
    bin_folder = folder / "topkd/bin"
    select = [str(bin_folder / "python"), "-c", PROGRAM]
    with serving(folder, environ, [str(bin_folder / command()[0])]) as server:
        asked = [bin_folder / "topkd", "health", "--target", f"127.0.0.1:{HEALTH_PORT}"]
        subprocess.run(asked, env=environ, check=True, stdout=subprocess.DEVNULL)
        confine = may_confine()
        subprocess.run(confined(folder, select, engine=True) if confine else select, env=environ, check=True)
        if confine:
            say(
                "an engine of another user and PID namespace, with the sockets mounted read-only, attaches by its group"
            )
        look_at_process(server.pid, folder)
    say("a selection is right; status 0 after SIGTERM")


def check_compiles(folder: Path, environ: dict[str, str], arch: str) -> None:
    """Reads the metric of compilations of a server whose workers load an architecture's kernels when they start.

    Without a compiler and with the image's kernels it must be 0; with one and an empty cache it must not, so that the 0
    says something.
    """
    kept, nothing = dict(environ), folder / "nothing"
    nothing.mkdir()
    emptied = {**environ, "TOPKD_PRECOMPILED_DIR": str(nothing)}
    for part, variables, families in (("topkd", kept, None), ("with-compiler", emptied, [SMALLEST])):
        front = FRONT.format(worker=WORKER.format(arch=arch, families=families))
        with serving(folder, variables, [str(folder / part / "bin/python"), "-c", front]):
            ready = int((folder / "run/kernels").read_text())
            compiled = read_metric("topkd_compiles_total")
            late = read_metric("topkd_compiles_total", phase="ready")
        assert ready > 0, "no kernel was asked for"
        assert (compiled > 0) == (part == "with-compiler"), f"topkd_compiles_total is {compiled}, of {ready} kernels"
        assert late == 0, f"topkd_compiles_total is {late} after the start"
        source = "an empty cache" if families else "the image's kernels"
        say(f"a worker that starts with {ready} kernels for {arch} from {source}: topkd_compiles_total is {compiled:g}")


def look_at_process(pid: int, folder: Path) -> None:
    """Says as whom the server runs, and whether it could write to its own code."""
    status = Path(f"/proc/{pid}/status").read_text()
    users = set(re.search(r"^Uid:\s+(.*)$", status, re.MULTILINE)[1].split())  # type: ignore[index]
    mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    root = [line.split()[3].split(",")[0] for line in mounts if line.split()[1] == "/"]
    if os.geteuid() == 0 and users == {str(USER)}:
        assert root[-1] == "ro", f"the root is {root}"
        capabilities = re.search(r"^CapEff:\s+(\w+)$", status, re.MULTILINE)[1]  # type: ignore[index]
        assert int(capabilities, 16) == 0, capabilities
        say(f"it runs as user {USER}, without capabilities, on a read-only root")
    socket = (folder / "run/attach.sock").stat()
    assert socket.st_mode & 0o777 == 0o660, oct(socket.st_mode)


def read_metric(name: str, **labels: str) -> float:
    """Returns the sum of a metric's samples that have these labels; waits for the first, which come from a worker."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=10)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
        values = [float(value) for given, value in found if all(each in given for each in wanted)]
        if values:
            return sum(values)
        time.sleep(0.1)
    raise AssertionError(f"there is no metric {name} with {wanted}")


def main() -> int:
    """Builds and checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--kernels", type=Path, help="directory of kernels compiled before, to take what still fits from"
    )
    parser.add_argument("--arch", action="append", help="architecture to compile for (default: sm_90a)")
    options = parser.parse_args()
    archs = options.arch or ["sm_90a"]
    with tempfile.TemporaryDirectory(prefix="topkd-image-", dir="/var/tmp") as name:  # /tmp is covered, see `confined`
        folder = Path(name)
        folder.chmod(0o755)
        build(folder, options.kernels, archs)
        (folder / "run").mkdir(mode=0o750)
        environ = {"HOME": "/nonexistent", **settings(folder)}
        check_kernels(folder, environ, archs)
        if may_confine():
            os.chown(folder / "run", USER, USER)
        else:
            say("NOT SHOWN: user 10001 and the read-only root (needs root and namespaces); it runs as the caller")
        check_server(folder, environ)
        check_compiles(folder, environ, archs[0])
        sizes = subprocess.run(
            ["du", "-sm", folder / "topkd", folder / "kernels"], capture_output=True, text=True, check=True
        )
        say(
            "MiB, with torch for the CPU: "
            + ", ".join(line.replace(f"{folder}/", "") for line in sizes.stdout.splitlines())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
