"""`topkd explain` on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topkd import kernels
from topkd.cli import main


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["explain", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_it_names_the_kernel_the_reason_and_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    document = explained(capsys, "16", "131072", "2048", "--device", "a100", "--order", "index", "--ties", "lowest")
    assert document["device"] == "a100"
    assert document["kernel"] not in ("torch", "cluster")
    assert "not cluster: " in str(document["reason"])
    families = document["families"]
    assert isinstance(families, list)
    assert [one["family"] for one in families] == list(kernels.kernels())
    assert [one["unmet"] for one in families if one["family"] == document["kernel"]] == [None]


def test_families_that_lack_the_same_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    reason = str(explained(capsys, "16", "131072", "2048", "--device", "cpu")["reason"])
    several = [name for name in kernels.kernels() if name != "torch"]
    assert reason.startswith(f"not {', '.join(several)}: each needs a CUDA device")


def test_it_goes_by_the_active_bound(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "a100", "--dtype", "f32", "--group", "4", "--pooled", "--max-length", "16384")
    document = explained(capsys, "256", "65536", "512", *options)
    assert (document["bound"], document["elements"]) == (4096, 4096)


def test_it_prints_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "1", "131072", "2048", "--device", "a100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 x 131,072 bfloat16, k = 2,048 on a100, at most 131,072 elements a row"
    assert lines[1].startswith("kernel ")
    assert any(line.split()[:2] == ["cluster", "cannot:"] for line in lines)


def test_it_reads_shapes_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("rows,width,k,dtype,pin_newest,max_length\n1,4096,512,f32,,\n64,9000,20,,true,4000\n")
    assert main(["explain", "--file", str(path), "--device", "a100", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["selection"]["dtype"] == "f32"
    assert (second["selection"]["pin_newest"], second["bound"]) == (True, 4000)
    assert main(["explain", "--file", str(path), "--device", "a100"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    assert "64 x 9,000 bfloat16, k = 20" in table[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1", "2"], "three numbers"),
        ([], "--file"),
        (["1", "9", "2", "--file", "x.csv"], "not both"),
        (["--file", "nowhere.csv"], "nowhere.csv"),
        (["1", "9", "2", "--device", "abacus"], "h200"),
        (["1", "9", "2", "--dtype", "nothing"], "no dtype"),
        (["1", "9", "0"], "k is 0"),
        (["1", "9", "2", "--device", "a100", "--kernel", "cluster"], "cannot serve"),
        (["-1", "9", "2"], "rows is -1"),
        (["1", "99999999999", "2"], "width is 99999999999"),
        (["99999999999999999999", "9", "2"], "rows is 99999999999999999999"),
    ],
)
def test_it_says_what_is_wrong(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == (1 if text == "nowhere.csv" else 2)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("rows,width,k\n1,x,2\n", "line 2"),
        ("rows,width,k,colour\n1,9,2,red\n", "colour"),
        ("rows,width,k,values\n1,9,2,maybe\n", "true or false"),
        ("rows,width\n1,9\n", "k"),
    ],
)
def test_it_says_what_is_wrong_in_a_file(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(content)
    assert main(["explain", "--file", str(path)]) == 2
    assert text in capsys.readouterr().err
