"""The host side of the `radix_wide` family, and what its compiled code takes of a GPU; no GPU is needed."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
import torch

from topkd.kernels import validate_select
from topkd.kernels._cute_compile import arch_of, installed, load_or_compile
from topkd.kernels._cute_launch import flags_word, launch_arguments
from topkd.kernels._family import Job
from topkd.kernels.radix_wide import RadixWideFamily

FRAME_SIZE, REGISTERS = 0x11, 0x2F
"""Attributes in a cubin's .nv.info: bytes of a kernel's stack frame (spills live there), registers of a thread."""
needs_compiler = pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl")


def test_a_cpu_tensor_is_not_served() -> None:
    unmet = RadixWideFamily().unmet(validate_select(torch.zeros(2, 9), 3))
    assert unmet is not None
    assert "CUDA" in unmet


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, topkd.kernels.radix_wide; print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_names_of_architectures(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


def test_a_table_without_pages_is_still_a_table() -> None:
    request = validate_select(torch.zeros(1, 9), 3, page_table=torch.zeros(1, 0, dtype=torch.int32))
    indices = torch.zeros(1, 3, dtype=torch.int32)
    assert launch_arguments(Job(request, indices, None))[10] != 0


def test_every_option_has_a_bit_of_its_own() -> None:
    scores = torch.zeros(2, 16)
    offsets = torch.zeros(2, dtype=torch.int64)
    words = [
        flags_word(validate_select(scores, 1, **options))
        for options in (
            {"pin_newest": True},
            {"drop_neg_inf": True},
            {"group": 2, "drop_neg_inf": False, "expand": True},
            {"group": 2, "drop_neg_inf": False, "pooled": True},
            {"ties": "highest"},
            {"order": "value"},
            {"index_dtype": torch.int64},
        )
    ]
    plain = flags_word(validate_select(scores, 1))
    assert sorted(word ^ plain for word in words) == [1 << bit for bit in range(1, 8)]
    wide = {"index_dtype": torch.int64, "row_offsets": offsets}
    assert flags_word(validate_select(scores, 1, **wide)) ^ plain == 1 << 7 | 1 << 8
    assert flags_word(validate_select(scores, 1, largest=False)) == 0


def resources(cubin: bytes) -> dict[int, list[int]]:
    """The values of each attribute in a cubin's .nv.info, by attribute; all of ours have one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found: dict[int, list[int]] = {}
    for name, _, _, _, offset, length in headers:
        start = names + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + length:
            kind, attribute, bytes_of_value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if kind == 4:
                found.setdefault(attribute, []).append(struct.unpack_from("<I", cubin, at + 4)[0])
                at += bytes_of_value
    return found


@needs_compiler
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_variant_compiles_without_spills(dtype: str, grouped: bool, arch: str) -> None:
    made = load_or_compile("radix_wide_kernel", "RadixWide", (dtype, grouped), arch)
    found = resources(made.binary)
    assert set(found[FRAME_SIZE]) == {0}
    assert max(found[REGISTERS]) <= 64  # 1,024 threads share 65,536
