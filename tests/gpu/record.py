"""The record of the GPU tests: what ran where, on which code, with which outcome.

    python tests/gpu/record.py run [--tests FOLDER] [--workers N] [--part NAME] [--again] [PYTEST ARGUMENTS]
        run the tests, write record.json and junit-*.xml; with --again only the test files that have failed or changed
    python tests/gpu/record.py check
        is the record of the code as it stands?

A machine without a GPU cannot run these tests, so their outcome is committed, with a hash of every file that it stands
for: the kernels, the test files that ran, and what those import from tests/. `check` compares the hashes with
the tree. The tests run in parts, one after another, and the record is written after each: what ran on the same kind of
device, and stands for the same files, stays in the record when something else is run.
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
OUTCOMES = ("passed", "failed", "skipped")
FINISHED = (0, 1)
"""pytest's exit status when all tests have run: all passed, or some failed."""
NOTHING_RAN = 5
"""pytest's exit status when none of the files has a test of the part."""
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
    files = support(root) | {name for name in marked(root) | ran if (root / name).is_file()}
    return {name: digest(root / name) for name in sorted(files - set(NOT_HASHED))}


def support(root: Path) -> set[str]:
    """Returns the files that all tests stand for."""
    files = {path.relative_to(root).as_posix() for path in (root / "kernels").rglob("*") if is_source(path)}
    for pattern in SUPPORT:
        files |= {path.relative_to(root).as_posix() for path in root.glob(pattern)}
    return files


def differing(recorded: dict[str, str], now: dict[str, str]) -> set[str]:
    """Returns the files that are not as they were recorded, those that are gone or new among them."""
    return {name for name in now.keys() | recorded.keys() if now.get(name) != recorded.get(name)}


def is_source(path: Path) -> bool:
    """Says whether a path under kernels/ is a file that can be committed."""
    return path.is_file() and "__pycache__" not in path.parts


def marked(root: Path) -> set[str]:
    """Returns the test files that carry the marker gpu themselves, but for those that measure: no part runs them."""
    paths = (path for path in (root / "tests").rglob("test_*.py") if path.parent.name != "bench")
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


def read_junit(path: Path) -> dict[str, dict[str, int]]:
    """Returns the counts of each test file in a JUnit file; a case that was cut off while it ran is none."""
    files: dict[str, dict[str, int]] = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.get("name") is None:
            continue
        outcome = {child.tag for child in case}
        how = "failed" if outcome & {"failure", "error"} else "skipped" if "skipped" in outcome else "passed"
        files.setdefault(str(case.get("file")), dict.fromkeys(OUTCOMES, 0))[how] += 1
    return files


def junit(part: str, again: bool = False) -> Path:
    """Returns where a part's JUnit file is, or that of what was run again, relative to the project."""
    return Path(f"tests/gpu/junit-{part}{'-again' if again else ''}.xml")


def without_paths(path: Path, *folders: str) -> None:
    """Takes a machine's folders out of a file: by default the project's and Python's."""
    text = path.read_text()
    for folder in folders or (str(ROOT), sys.prefix):
        text = text.replace(f"{folder}/", "")
    path.write_text(text)


def run(
    folder: Path, arguments: list[str], workers: int | None = None, parts: Sequence[str] = (), again: bool = False
) -> int:
    """Runs the tests in a folder that holds a copy of tests/, and writes the record into the tree after each part.

    Args:
        folder: Where pytest runs.
        arguments: More of its arguments; with any, the record is of a part only.
        workers: Processes that share the tests (pytest-xdist), but for the exclusive ones. None: all run one by one.
        parts: Names of `PARTS`; none are all.
        again: Run only the test files that have failed, or are not in the record as they are.
    """
    if differs := installed_differs(ROOT):
        raise SystemExit(f"record: the installed topkd is not of this tree: {', '.join(differs)}")
    about, status = device(), 0
    uuid = about.pop("uuid")
    record = kept(ROOT, about) if (parts or again) and not arguments else {}
    for name in parts or PARTS:
        part = PARTS[name]
        before = record.get("parts", {}).get(name, {}) if again else {}
        chosen = part.arguments if not again else tuple(to_run_again(ROOT, record, name))
        if not chosen and again:
            continue
        shared = ["-n", str(min(workers, part.most)), "--dist", part.dist] if workers is not None and part.dist else []
        results = ROOT / junit(name, again)
        options = ["-m", part.marks, f"--junit-xml={results}", *chosen, *shared, *arguments]
        with environment(part) as variables:
            command = [sys.executable, "-m", "pytest", *options]
            ended = subprocess.run(command, cwd=folder, env=variables, check=False).returncode
        if again and ended == NOTHING_RAN:
            ended = 0
        status = ended or status
        without_paths(results)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        files = {file: {"date": date, "uuid": uuid, **counts} for file, counts in read_junit(results).items()}
        done = {
            "finished": ended in FINISHED and before.get("finished", True),
            "missing": sorted(set(before.get("missing", ())) - set(files)),
            "files": before.get("files", {}) | files,
        }
        record = joined(ROOT, record, name, done) | {"device": about, "versions": versions()}
        record["complete"] &= not arguments
        (ROOT / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        counts = ", ".join(f"{sum(file[how] for file in files.values())} {how}" for how in OUTCOMES)
        print(f"{RECORD}, of {about['name']}: {name}: {counts}")
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
    """Returns what the record that is there has of the files as they are, nothing if it is of another kind of device.

    A test file that has changed is missing in its part.
    """
    try:
        record: dict[str, Any] = json.loads((root / RECORD).read_text())
        ran = {file for part in record["parts"].values() for file in part["files"]}
        changed = differing(record["sha256"], hashes(root, ran))
        if record["device"] != about or changed - marked(root) - (ran - support(root)):
            return {}
        for part in record["parts"].values():
            missing = {*part["missing"], *(changed & part["files"].keys())}
            part["missing"] = sorted(name for name in missing if (root / name).is_file())
            part["files"] = {name: counts for name, counts in part["files"].items() if name not in changed}
    except (FileNotFoundError, KeyError):
        return {}
    return record


def to_run_again(root: Path, record: dict[str, Any], name: str) -> list[str]:
    """Returns the test files of a part that have failed, or that the record does not have as they are.

    A file that is new may be of any part: pytest finds nothing to run in the others.
    """
    part = record.get("parts", {}).get(name, {"missing": [], "files": {}})
    failed = {file for file, counts in part["files"].items() if counts["failed"]}
    unknown = marked(root) - set(record.get("sha256", ())) - set(NOT_HASHED)
    new = {file for file in unknown if file.startswith(KERNELS) == (name == "kernels")}
    return sorted(failed.union(part["missing"], new))


def joined(root: Path, record: dict[str, Any], name: str, done: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with a part that has run, and what follows from all of its parts.

    Args:
        root: The project.
        record: What there was, or nothing.
        name: Of the part.
        done: The counts of each test file, with date and device; whether it ran to its end, and what is missing still.
    """
    parts = {**record.get("parts", {}), name: done}
    files = [file for part in parts.values() for file in part["files"].values()]
    return {
        "date": max((file["date"] for file in files), default=""),
        "parts": parts,
        "complete": set(parts) == set(PARTS)
        and all(part["finished"] and not part["missing"] for part in parts.values()),
        "counts": {how: sum(file[how] for file in files) for how in OUTCOMES},
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
    changed = sorted(differing(recorded, now))
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
    runner.add_argument("--again", action="store_true", help="run only the test files that have failed or changed")
    runner.add_argument("--workers", type=int, metavar="N", help="processes that share the tests (pytest-xdist)")
    commands.add_parser("check", help="exit 0 if the record is of the code as it stands")
    args, rest = parser.parse_known_args(argv)
    if args.command == "run":
        return run(args.tests, rest, args.workers, args.part, args.again)
    good, lines = check(ROOT)
    print(*lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
