"""The record of the GPU tests: what ran where, on which code, with which outcome.

    python tests/gpu/record.py run [--tests FOLDER] [--workers N] [--part NAME] [PYTEST ARGUMENTS]
        run the tests, write record.json and junit-*.xml
    python tests/gpu/record.py check
        is the record of the code as it stands?

A machine without a GPU cannot run these tests, so their outcome is committed, with a hash of every file that it stands
for: the kernels, the test files that ran, and what those import from tests/. `check` compares the hashes with
the tree. The tests run in parts, one after another, and the record is written after each: a part that ran on the same
kind of device and the same files stays in the record when another is run.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path("tests/gpu/record.json")
KERNELS = ("tests/gpu", "tests/kernels")


class Part(NamedTuple):
    """Some of the tests.

    Attributes:
        marks: What pytest selects by.
        arguments: More of its arguments.
        dist: How processes share them, an argument of pytest-xdist; None: they run one after another.
        most: Processes that may share them.
        mps: They run under MPS, which is started for them.
    """

    marks: str
    arguments: tuple[str, ...] = ()
    dist: str | None = None
    most: int = 64
    mps: bool = False


PARTS = {
    "exclusive": Part("gpu and exclusive and not bench and not mps"),
    # A process runs a whole file: its servers start once. It has up to six CUDA contexts by then, with its servers'
    # spares and workers and its engines; without MPS an H200 takes about 36 (2026-12-01).
    "service": Part(
        "gpu and not exclusive and not bench and not mps",
        tuple(f"--ignore={folder}" for folder in KERNELS),
        "loadfile",
        5,
    ),
    "kernels": Part("gpu and not exclusive and not bench and not mps", KERNELS, "worksteal"),
    "mps": Part("gpu and mps and not bench", (), "loadfile", 2, mps=True),
}
FINISHED = (0, 1)
"""pytest's exit status when all tests have run: all passed, or some failed."""
PACKAGES = ("topkd", "torch", "grpcio", "protobuf", "numpy", "hypothesis", "pytest")
SUPPORT = ("tests/*.py", "tests/**/conftest.py", "tests/conformance/*.py", "tests/data/*.npz")
NOT_HASHED = ("tests/gpu/record.py", "tests/gpu/test_record.py")


def digest(path: Path) -> str:
    """Returns a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(root: Path, ran: set[str]) -> dict[str, str]:
    """Returns the hash of every file that a record stands for.

    Args:
        root: The project.
        ran: Test files that ran, relative to the project.
    """
    files = {path.relative_to(root).as_posix() for path in (root / "kernels").rglob("*") if is_source(path)}
    for pattern in SUPPORT:
        files |= {path.relative_to(root).as_posix() for path in root.glob(pattern)}
    files |= {name for name in marked(root) | ran if (root / name).is_file()}
    return {name: digest(root / name) for name in sorted(files - set(NOT_HASHED))}


def is_source(path: Path) -> bool:
    """Says whether a path under kernels/ is a file that can be committed."""
    return path.is_file() and "__pycache__" not in path.parts


def marked(root: Path) -> set[str]:
    """Returns the test files that carry the marker gpu themselves."""
    paths = (root / "tests").rglob("test_*.py")
    return {path.relative_to(root).as_posix() for path in paths if re.search(r"mark\.gpu\b", path.read_text())}


def installed_differs(root: Path) -> list[str]:
    """Returns the files of kernels/ that the importable `topkd.kernels` does not have as the tree has them."""
    import topkd.kernels

    there = Path(str(topkd.kernels.__file__)).parent
    tree = root / "kernels"
    names = [path.relative_to(tree) for path in tree.rglob("*.py")]
    return [f"kernels/{name}" for name in names if not same(there / name, tree / name)]


def same(one: Path, other: Path) -> bool:
    """Says whether two files are there and equal."""
    return one.is_file() and one.read_bytes() == other.read_bytes()


def device() -> dict[str, Any]:
    """Describes the GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("record: torch finds no GPU here")
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "name": properties.name,
        "uuid": f"GPU-{properties.uuid}",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
    }


def versions() -> dict[str, str]:
    """Returns the versions of what took part."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # topkd on PYTHONPATH, for one
            found[name] = "not installed as a package"
    return found


def read_junit(path: Path) -> tuple[dict[str, int], set[str]]:
    """Returns the counts of a JUnit file, and the test files that its cases are from."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    files = set()
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.get("name") is None:  # cut off while it ran
            continue
        outcome = {child.tag for child in case}
        if outcome & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in outcome:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
        if "skipped" not in outcome:
            files.add(str(case.get("file")))
    return counts, files


def junit(part: str) -> Path:
    """Returns where a part's JUnit file is, relative to the project."""
    return Path(f"tests/gpu/junit-{part}.xml")


def without_paths(path: Path, *folders: str) -> None:
    """Takes a machine's folders out of a file: by default the project's and Python's."""
    text = path.read_text()
    for folder in folders or (str(ROOT), sys.prefix):
        text = text.replace(f"{folder}/", "")
    path.write_text(text)


def run(folder: Path, arguments: list[str], workers: int | None = None, parts: Sequence[str] = ()) -> int:
    """Runs the tests in a folder that holds a copy of tests/, and writes the record into the tree after each part.

    Args:
        folder: Where pytest runs.
        arguments: More of its arguments; with any, the record is of a part only.
        workers: Processes that share the tests (pytest-xdist), but for the exclusive ones. None: all run one by one.
        parts: Names of `PARTS`; none are all.
    """
    if differs := installed_differs(ROOT):
        raise SystemExit(f"record: the installed topkd is not of this tree: {', '.join(differs)}")
    about, status = device(), 0
    uuid = about.pop("uuid")
    record = kept(ROOT, about) if parts and not arguments else {}
    for name in parts or PARTS:
        part = PARTS[name]
        shared = ["-n", str(min(workers, part.most)), "--dist", part.dist] if workers is not None and part.dist else []
        options = ["-m", part.marks, f"--junit-xml={ROOT / junit(name)}", *part.arguments, *shared, *arguments]
        with environment(part) as variables:
            command = [sys.executable, "-m", "pytest", *options]
            ended = subprocess.run(command, cwd=folder, env=variables, check=False).returncode
        status = ended or status
        without_paths(ROOT / junit(name))
        counts, files = read_junit(ROOT / junit(name))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        done = {"date": date, "uuid": uuid, "counts": counts, "finished": ended in FINISHED, "files": sorted(files)}
        record = joined(ROOT, record, name, done) | {"device": about, "versions": versions()}
        record["complete"] &= not arguments
        (ROOT / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        print(f"{RECORD}, of {about['name']}: {name}: {', '.join(f'{count} {how}' for how, count in counts.items())}")
    return status


@contextmanager
def environment(part: Part) -> Iterator[dict[str, str] | None]:
    """Yields the environment of a part's processes: with MPS, or this one's, which is None."""
    if not part.mps:
        yield None
        return
    sys.path.insert(0, str(ROOT))
    from tests.bench.mps import with_mps

    with with_mps() as variables:
        if variables is None:
            raise SystemExit("record: there is no MPS here")
        yield variables


def kept(root: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the record that is there without the parts that are of another kind of device or of other files."""
    try:
        record: dict[str, Any] = json.loads((root / RECORD).read_text())
        if record["device"] != about:
            return {}
        parts = {name: part for name, part in record["parts"].items() if stands(root, record["sha256"], part["files"])}
    except (FileNotFoundError, KeyError):
        return {}
    return record | {"parts": parts} if parts else {}


def stands(root: Path, recorded: dict[str, str], ran: list[str]) -> bool:
    """Says whether the test files that ran, and what they stand for, are as they were recorded."""
    marks = marked(root) - set(ran)
    return all(recorded.get(name) == now for name, now in hashes(root, set(ran)).items() if name not in marks)


def joined(root: Path, record: dict[str, Any], name: str, done: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with a part that has run, and what follows from all of its parts.

    Args:
        root: The project.
        record: What there was, or nothing.
        name: Of the part.
        done: Its date, counts, test files that ran, and whether all of its tests have run.
    """
    parts = {**record.get("parts", {}), name: done}
    return {
        "date": max(part["date"] for part in parts.values()),
        "parts": parts,
        "complete": set(parts) == set(PARTS) and all(part["finished"] for part in parts.values()),
        "counts": {how: sum(part["counts"][how] for part in parts.values()) for how in ("passed", "failed", "skipped")},
        "sha256": hashes(root, {file for part in parts.values() for file in part["files"]}),
    }


def check(root: Path) -> tuple[bool, list[str]]:
    """Compares the record with the tree.

    Returns:
        Whether the code as it stands has passed on a GPU, and lines that say so.
    """
    try:
        record = json.loads((root / RECORD).read_text())
        recorded, counts, about = record["sha256"], record["counts"], record["device"]
    except FileNotFoundError:
        return False, [f"There is no {RECORD}: this code has not run on a GPU (make gpu-test)."]
    now = hashes(root, set(recorded))
    changed = sorted(name for name in now.keys() | recorded.keys() if now.get(name) != recorded.get(name))
    lines = [
        f"The record is of {record['date']}, {about['name']}, driver {about['driver']}: "
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped."
    ]
    if not record["complete"]:
        lines.append("It is of a part of the tests only, or they did not run to their end.")
    if counts["failed"] or not counts["passed"]:
        lines.append("It is no record of a success.")
    lines += [f"  {how(name, recorded, now)}: {name}" for name in changed]
    if changed:
        lines.append("The code has changed since: it is unproven on a GPU as it stands (make gpu-test).")
    good = not changed and record["complete"] and not counts["failed"] and counts["passed"] > 0
    if good:
        lines.append("It is of the code as it stands.")
    return good, lines


def how(name: str, recorded: dict[str, str], now: dict[str, str]) -> str:
    """Says how a file differs."""
    if name not in now:
        return "removed"
    return "changed" if name in recorded else "new"


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(description="The record of the GPU tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the tests marked gpu and write the record")
    runner.add_argument("--tests", type=Path, default=ROOT, metavar="FOLDER", help="folder to run pytest in")
    runner.add_argument("--part", choices=PARTS, action="append", default=[], help="run only this; again for more")
    runner.add_argument("--workers", type=int, metavar="N", help="processes that share the tests (pytest-xdist)")
    commands.add_parser("check", help="exit 0 if the record is of the code as it stands")
    args, rest = parser.parse_known_args(argv)
    if args.command == "run":
        return run(args.tests, rest, args.workers, args.part)
    good, lines = check(ROOT)
    print(*lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
