"""The main job in one command, `make demo`: a server process, and an engine process that selects by it.

The server computes on a GPU if there is one, else on the CPU. Exit status 0 if every row came out right and everything
stopped in order.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = HERE.parent.parent / "tests" / "data" / "indexer_rows.npz"
TOPKD = [sys.executable, "-m", "topkd"]
START_SECONDS = 120
SHOWN = (
    "topkd_requests_total",
    "topkd_rows_total",
    "topkd_kernel_seconds_sum",
    "topkd_kernel_seconds_count",
    "topkd_sessions",
)


def free_port() -> int:
    """Returns a TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def server(directory: Path, metrics_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `topkd serve` until the end of the block; raises if it does not start or stop in order."""
    command = [*TOPKD, "serve", "--socket-dir", str(directory), "--metrics-port", str(metrics_port)]
    log = directory.parent / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out)
    try:
        wait_until_healthy(process, directory)
        yield process
        process.send_signal(signal.SIGTERM)
        if status := process.wait(30):
            raise RuntimeError(f"the server ended with status {status}")
    except BaseException:
        print("The server's log ends with:", *log.read_text().splitlines()[-20:], sep="\n", file=sys.stderr)
        raise
    finally:
        process.kill()
        process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Asks `topkd health` until it says SERVING."""
    until = time.monotonic() + START_SECONDS
    health = [*TOPKD, "health", "--target", str(directory), "--timeout", "5"]
    while subprocess.run(health, stdout=subprocess.DEVNULL, check=False).returncode:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the server did not start")
        time.sleep(0.1)


def metrics(port: int) -> list[str]:
    """Returns a few lines of the server's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return [line for line in lines if line.startswith(SHOWN) and not line.endswith(" 0.0")]


def main() -> int:
    """Runs the demo; returns the exit status."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="topkd-demo-") as folder:
        directory, port = Path(folder) / "sockets", free_port()
        with server(directory, port) as process:
            print(f"server: pid {process.pid}, ready after {time.monotonic() - started:.1f} s, sockets in {directory}")
            engine = subprocess.run([sys.executable, str(HERE / "engine.py"), str(directory), str(ROWS)], check=False)
            print(f"\nA few lines of http://127.0.0.1:{port}/metrics:")
            print(*metrics(port), sep="\n")
    print(f"\nEverything has stopped, after {time.monotonic() - started:.1f} s.")
    print("The demo went right." if engine.returncode == 0 else "The demo FAILED: see above.")
    return engine.returncode


if __name__ == "__main__":
    sys.exit(main())
