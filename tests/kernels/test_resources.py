"""What compiled kernels take of a GPU: read from binaries, reported, compared."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import resources
from topkd.kernels._cubin import Resources, read_resources

ATTRIBUTES = [(0x2F, 9, 40), (0x11, 4, 0), (0x11, 9, 24), (0x12, 9, 8), (0x2F, 4, 22)]
CODE = [0x7387, 0x0983, 0x1387, 0xF984, 0x0387]  # stores and loads of local memory, but for the fourth


def binary(attributes: list[tuple[int, int, int]] | None = None) -> bytes:
    """An ELF file as the compiler makes them, as far as it is read."""
    given = ATTRIBUTES if attributes is None else attributes
    info = struct.pack("<BBH", 3, 0x19, 0x1234)  # of a format without a payload
    info += b"".join(struct.pack("<BBHII", 4, attribute, 8, symbol, value) for attribute, symbol, value in given)
    code = b"".join(struct.pack("<H14x", word) for word in CODE)
    sections = [("", 0, b"", 0), (".nv.info", 1, info, 0), (".text.kernel", 1, code, 0)]
    sections += [(".nv.shared.kernel", 8, b"", 1024), (".nv.shared.reserved.0", 8, b"", 4096)]
    names = "".join(name + "\0" for name, *_ in sections) + ".shstrtab\0"
    sections.append((".shstrtab", 3, names.encode(), 0))
    body, headers = b"", b""
    for name, kind, data, size in sections:
        at = names.index(name + "\0")
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), size or len(data), 0, 0, 0, 0)
        body += data
    start = 64 + len(body)
    count = len(sections)
    return struct.pack("<4s36xQ10xHHH", b"\x7fELF", start, 64, count, count - 1) + body + headers


def test_a_binary_is_read() -> None:
    assert len(binary()) > 64
    assert read_resources(binary()) == Resources(40, 1024, 24, local_loads=1, local_stores=3)


def test_what_is_no_whole_binary_is_refused() -> None:
    data = binary()
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"binary|cut off"):
            read_resources(data[:length])
    with pytest.raises(ValueError, match="no ELF"):
        read_resources(b"x" * 500)
    with pytest.raises(ValueError, match="no registers"):
        read_resources(binary([]))


def row(variant: str = "float32", arch: str = "sm_80", **taken: int) -> dict[str, Any]:
    return {
        "family": "small",
        "arch": arch,
        "variant": variant,
        "resources": {"registers": 40, "threads": 256, **taken},
    }


def report(*rows: dict[str, Any], made_by: str = "one") -> str:
    return resources.written(resources.compiled(list(rows)), made_by)


def test_a_report_comes_back_whole() -> None:
    rows = [row(), row("float16", local_loads=3)]
    assert resources.check(rows, report(*rows), "one") == (True, ["2 variants for sm_80; 0 of them spill registers."])
    assert resources.read(report(*rows)) == (resources.compiled(rows), "one")


def test_what_differs_is_said() -> None:
    old = report(row(), row("gone"))
    good, lines = resources.check([row(registers=48, local_stores=2), row("new")], old, "one")
    assert not good
    text = "\n".join(lines)
    assert "1 of them spill" in lines[0]
    assert "changed: small sm_80 float32: registers 40 -> 48, local_stores  -> 2" in text
    assert "gone: small sm_80 gone" in text
    assert "new: small sm_80 new: threads 256, registers 40" in text
    assert "make resources" in text
    assert "another compiler" not in text
    assert "another compiler: one; here it is two" in "\n".join(resources.check([row(registers=1)], old, "two")[1])


def test_another_compiler_whose_code_takes_the_same_is_no_difference() -> None:
    assert resources.check([row()], report(row()), "two")[0]


def test_only_what_was_compiled_is_compared() -> None:
    assert resources.check([row()], report(row(), row(arch="sm_90a")), "one")[0]
    assert not resources.check([row(), row(arch="sm_90a")], report(row()), "one")[0]


def test_too_many_variants_are_an_error() -> None:
    rows = [row(str(number)) for number in range(resources.MOST_VARIANTS + 1)]
    good, lines = resources.check(rows, report(*rows), "one")
    assert not good
    assert "121 variants" in lines[-1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "compiler", lambda: "one")
    compiled, kept = tmp_path / "compiled.json", tmp_path / "report.csv"
    compiled.write_text(json.dumps([row()]))
    assert resources.main(["check", str(compiled), str(kept)]) == 1
    assert "make resources" in capsys.readouterr().out
    assert resources.main(["write", str(compiled), str(kept)]) == 0
    assert "make resources" not in capsys.readouterr().out
    assert resources.main(["check", str(compiled), str(kept)]) == 0


def test_the_committed_report_is_of_the_three_architectures() -> None:
    kept, made_by = resources.read(resources.REPORT.read_text())
    assert made_by.startswith("nvidia-cutlass-dsl ")
    assert {key[1] for key in kept} == {"sm_80", "sm_90a", "sm_100a"}
    assert all(columns["threads"] and columns["registers"] for columns in kept.values())
