"""`make deploy-check`: looks at everything that deploys topkd, with tools that need neither Docker nor a cluster.

    python deploy/check.py          check
    python deploy/check.py render   write the chart's README and the plain manifests anew

Runs in the environment of deploy/requirements.txt. Every part prints what it looked at; the first that fails ends it.
"""

import re
import subprocess
import sys
from pathlib import Path

import check_chart
import check_compose

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOT_SHOWN = """\
Not shown here, because it takes a Docker engine, a cluster or a GPU:
  - that the images build from their bases and start in containers (make image-check takes their steps without Docker)
  - that a kubelet admits and starts the pods, and that probes, claims, network policies and monitors act as they say
  - that CUDA IPC and MPS work between containers as compose.yaml and the chart arrange it
"""


def check_dockerfile() -> None:
    """Lints the Dockerfile, and compares the locks of its wheels with the constraints."""
    subprocess.run([Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], check=True)
    print("hadolint: Dockerfile is clean")
    subprocess.run([sys.executable, HERE / "image/lock.py", "check"], check=True)


def check_hosts() -> None:
    """Says that no file names a registry's host: images come from wherever a site has them."""
    listed = subprocess.run(
        ["git", "ls-files", "deploy", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split() if (ROOT / name).suffix not in (".png", ".lock")]
    parts = ("ghcr", "quay", "docker", "gcr", "nvcr", "k8s.gcr", "registry.k8s")
    hosts = [f"{part}.io/" for part in parts]
    found = [f"{path.relative_to(ROOT)}: {host}" for path in paths for host in hosts if host in path.read_text()]
    assert not found, found
    print(f"registries: none is named in {len(paths)} files")


def check_stop() -> None:
    """Says that no command of ours starts a container that Docker would kill before its drain is over."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for name in listed.stdout.split() for line in (ROOT / name).read_text().splitlines()]
    runs = [line for line in lines if re.match(r"[# ]*docker run .*topkd", line)]
    assert runs, "no docker run is documented"
    for line in runs:
        grace = re.search(r"--stop-timeout (\d+)", line)
        assert grace is not None, f"without --stop-timeout: {line}"
        assert int(grace[1]) > check_compose.DRAIN, f"killed before its drain is over: {line}"
    print(f"docker run: {len(runs)} commands give the drain its time")


def main() -> int:
    """Checks, or renders."""
    if sys.argv[1:] == ["render"]:
        check_chart.write_rendered()
        return 0
    check_dockerfile()
    check_hosts()
    check_stop()
    check_compose.check()
    check_chart.check()
    print(NOT_SHOWN, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
