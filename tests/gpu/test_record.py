from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import slow_ones_first
from tests.gpu import record

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.kernels.test_select" name="a" file="tests/kernels/test_select.py"/>
<testcase classname="tests.kernels.test_select" name="b" file="tests/kernels/test_select.py"><failure/></testcase>
<testcase classname="tests.kernels.test_other" name="c" file="tests/kernels/test_other.py"><skipped/></testcase>
<testcase time="0.001" /></testsuite></testsuites>
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "kernels/a.py": "A = 1\n",
        "kernels/__pycache__/a.pyc": "",
        "tests/oracle.py": "",
        "tests/conftest.py": "",
        "tests/kernels/test_marked.py": "@pytest.mark.gpu\n",
        "tests/bench/test_marked.py": "@pytest.mark.bench\n@pytest.mark.gpu\n",
        "tests/kernels/test_plain.py": "",
        "tests/kernels/test_ran.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/gpu").mkdir()
    return tmp_path


def write_record(tree: Path, **changes: object) -> None:
    whole = {
        "date": "2026-01-01T00:00:00+00:00",
        "device": {"name": "GPU", "driver": "1"},
        "counts": {"passed": 2, "failed": 0, "skipped": 0},
        "complete": True,
        "sha256": record.hashes(tree, {"tests/kernels/test_ran.py"}),
    }
    (tree / record.RECORD).write_text(json.dumps(whole | changes))


def test_hashes_cover_kernels_support_and_the_gpu_tests(tree: Path) -> None:
    assert list(record.hashes(tree, {"tests/kernels/test_ran.py"})) == [
        "kernels/a.py",
        "tests/conftest.py",
        "tests/kernels/test_marked.py",
        "tests/kernels/test_ran.py",
        "tests/oracle.py",
    ]


def test_a_record_of_the_tree_as_it_stands_is_good(tree: Path) -> None:
    write_record(tree)
    good, lines = record.check(tree)
    assert good
    assert lines[-1] == "It is of the code as it stands."


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("kernels/a.py", "A = 2\n", "changed: kernels/a.py"),
        ("kernels/b.py", "", "new: kernels/b.py"),
        ("kernels/a.py", None, "removed: kernels/a.py"),
        ("tests/kernels/test_ran.py", "B = 1\n", "changed: tests/kernels/test_ran.py"),
        ("tests/kernels/test_new.py", "@pytest.mark.gpu\n", "new: tests/kernels/test_new.py"),
    ],
)
def test_a_file_that_differs_is_named(tree: Path, path: str, text: str | None, said: str) -> None:
    write_record(tree)
    if text is None:
        (tree / path).unlink()
    else:
        (tree / path).write_text(text)
    good, lines = record.check(tree)
    assert not good
    assert f"  {said}" in lines


def test_a_file_that_no_gpu_test_reads_may_change(tree: Path) -> None:
    write_record(tree)
    (tree / "tests/kernels/test_plain.py").write_text("B = 1\n")
    assert record.check(tree)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": {"passed": 2, "failed": 1, "skipped": 0}},
        {"counts": {"passed": 0, "failed": 0, "skipped": 2}},
        {"complete": False},
    ],
)
def test_a_record_of_no_success_is_not_good(tree: Path, changes: dict[str, object]) -> None:
    write_record(tree, **changes)
    assert not record.check(tree)[0]


def test_no_record_is_not_good(tree: Path) -> None:
    good, lines = record.check(tree)
    assert not good
    assert "make gpu-test" in lines[0]


def test_counts_and_files_of_a_junit_file(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    counts = {
        file: tuple(outcomes[how] for how in ("passed", "failed", "skipped"))
        for file, outcomes in record.read_junit(junit).items()
    }
    assert counts == {"tests/kernels/test_select.py": (1, 1, 0), "tests/kernels/test_other.py": (0, 0, 1)}


def test_folders_of_the_machine_are_left_out_of_a_junit_file(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("at /home/me/topkd/tests/gpu/test_a.py:3: in /opt/venv/lib/torch.py, /home/me")
    record.without_paths(path, "/home/me/topkd", "/opt/venv")
    assert path.read_text() == "at tests/gpu/test_a.py:3: in lib/torch.py, /home/me"


def done(*files: str, passed: int = 3, failed: int = 0, day: int = 1, finished: bool = True) -> dict[str, Any]:
    counts = {"date": f"2026-01-{day:02}T00:00:00+00:00", "passed": passed, "failed": failed, "skipped": 0}
    return {"finished": finished, "missing": [], "files": dict.fromkeys(files, counts)}


RAN, PLAIN, MARKED = (f"tests/kernels/test_{name}.py" for name in ("ran", "plain", "marked"))


def test_parts_make_one_record(tree: Path) -> None:
    first, again = done(RAN, failed=1, day=2), done(PLAIN, passed=2)
    both = record.joined(tree, record.joined(tree, {}, "kernels", first), "service", again)
    assert both["parts"] == {"kernels": first, "service": again}
    assert both["counts"] == {"passed": 5, "failed": 1, "skipped": 0}
    assert both["date"] == "2026-01-02T00:00:00+00:00"
    assert {RAN, PLAIN} <= set(both["sha256"])
    assert record.joined(tree, both, "kernels", again)["counts"] == {"passed": 4, "failed": 0, "skipped": 0}
    assert not both["complete"]
    assert not record.joined(tree, both, "exclusive", again)["complete"]
    whole = record.joined(tree, record.joined(tree, both, "exclusive", again), "mps", again)
    assert whole["complete"]
    assert not record.joined(tree, whole, "kernels", done(finished=False))["complete"]  # interrupted
    assert not record.joined(tree, whole, "kernels", done() | {"missing": [RAN]})["complete"]


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        (None, {}),
        (RAN, {"kernels": [RAN]}),
        (PLAIN, {"service": [PLAIN]}),
        (MARKED, {}),  # ran in neither
        ("kernels/a.py", None),
        ("tests/oracle.py", None),
        ("tests/new.py", None),
    ],
)
def test_what_stands_for_files_that_have_changed_is_left_out(
    tree: Path, changed: str | None, missing: dict[str, list[str]] | None
) -> None:
    about = {"name": "GPU", "driver": "1"}
    assert record.kept(tree, about) == {}
    whole = record.joined(tree, record.joined(tree, {}, "kernels", done(RAN)), "service", done(PLAIN))
    whole |= {"device": about}
    (tree / record.RECORD).write_text(json.dumps(whole))
    if changed:
        (tree / changed).write_text(f"{(tree / changed).read_text() if (tree / changed).exists() else ''}# more\n")
    kept = record.kept(tree, about)
    assert record.kept(tree, {**about, "driver": "2"}) == {}
    if missing is None:
        assert kept == {}
        return
    assert {name: part["missing"] for name, part in kept["parts"].items() if part["missing"]} == missing
    for name, part in kept["parts"].items():
        assert not set(part["missing"]) & set(part["files"])
        assert record.to_run_again(tree, kept, name) == part["missing"]


def test_a_test_file_that_is_gone_is_not_missing(tree: Path) -> None:
    about = {"name": "GPU", "driver": "1"}
    whole = record.joined(tree, {}, "kernels", done(RAN, PLAIN)) | {"device": about}
    (tree / record.RECORD).write_text(json.dumps(whole))
    (tree / RAN).unlink()
    part = record.kept(tree, about)["parts"]["kernels"]
    assert (part["missing"], list(part["files"])) == ([], [PLAIN])
    (tree / "kernels/a.py").unlink()
    assert record.kept(tree, about) == {}


def test_what_failed_or_is_new_runs_again(tree: Path) -> None:
    parts = {"kernels": done(RAN, failed=1), "service": done(PLAIN)}
    whole = {"parts": parts, "sha256": record.hashes(tree, {RAN, PLAIN})}
    assert record.to_run_again(tree, whole, "kernels") == [RAN]
    assert record.to_run_again(tree, whole, "service") == record.to_run_again(tree, whole, "mps") == []
    for new in ("tests/kernels/test_new.py", "tests/test_new.py", record.NOT_HASHED[1]):
        (tree / new).write_text("@pytest.mark.gpu\n")
    assert record.to_run_again(tree, whole, "kernels") == ["tests/kernels/test_new.py", RAN]
    assert record.to_run_again(tree, whole, "exclusive") == ["tests/test_new.py"]


def test_every_test_is_in_one_part() -> None:
    exclusive, service, kernels, mps = (record.PARTS[name] for name in ("exclusive", "service", "kernels", "mps"))
    assert mps.marks == "gpu and mps and not bench"
    assert mps.mps
    assert exclusive.marks.endswith("and not mps")
    assert not mps.arguments
    assert "and exclusive" in exclusive.marks
    assert not exclusive.arguments
    assert service.marks == kernels.marks == exclusive.marks.replace("and exclusive", "and not exclusive")
    assert service.arguments == tuple(f"--ignore={folder}" for folder in kernels.arguments)


class Item:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_closest_marker(self, _: str) -> object:
        return True if self.name.startswith("slow") else None


@pytest.mark.parametrize(("slow", "others", "processes"), [(3, 40, 5), (24, 3901, 13), (7, 2, 3), (0, 9, 4), (2, 0, 4)])
def test_every_process_begins_with_its_share_of_the_slow_tests(slow: int, others: int, processes: int) -> None:
    items: Any = [Item(f"quick {place}") for place in range(others)] + [Item(f"slow {place}") for place in range(slow)]
    ordered = slow_ones_first(items, processes)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    begins, waiting = 0, len(items)
    if others < slow:
        return
    for place in range(processes):
        size = waiting // (processes - place)  # what pytest-xdist gives a process
        run = [item.name.startswith("slow") for item in ordered[begins : begins + size]]
        assert run == sorted(run, reverse=True), "slow ones come first"
        assert abs(sum(run) - slow / processes) < 1
        begins, waiting = begins + size, waiting - size
