"""The host side of the `radix_wide` family; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.kernels import resources
from topkd.kernels import validate_select
from topkd.kernels._cute_compile import arch_of
from topkd.kernels._cute_launch import flags_word, launch_arguments
from topkd.kernels._family import Job
from topkd.kernels.radix_wide import RadixWideFamily


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


def test_no_variant_spills() -> None:
    report, _ = resources.read(resources.REPORT.read_text())
    found = [columns for (family, *_), columns in report.items() if family == "radix_wide"]
    assert len(found) == 18
    assert all((columns["stack"], columns["local_stores"]) == ("0", "0") for columns in found)
    assert all(int(columns["registers"]) <= 64 for columns in found), "1,024 threads share 65,536"
