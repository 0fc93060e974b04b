"""The host side of the `radix_register` and `small` families; no GPU is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from topkd.kernels import SelectRequest, kernels, validate_select
from topkd.kernels._cute_launch import launch_arguments
from topkd.kernels._family import Job
from topkd.kernels.radix_register import ANY, RadixRegisterFamily, arguments_of, facts_of, vectors_of
from topkd.kernels.radix_register_shape import LIST_CAPACITY
from topkd.kernels.small import SmallFamily

FAMILIES = [RadixRegisterFamily(), SmallFamily()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def request(width: int, k: int = 8, dtype: torch.dtype = torch.bfloat16, **options: Any) -> SelectRequest:
    """A request for rows that begin at multiples of 16 bytes."""
    pitch = -(-width // 8) * 8
    return validate_select(torch.empty(2, pitch, dtype=dtype)[:, :width], k, **options)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_cpu_tensor_is_not_served(family: RadixRegisterFamily) -> None:
    assert "CUDA" in str(family.unmet(request(100)))
    assert family.name in kernels()


def test_importing_the_families_loads_no_compiler() -> None:
    code = "import sys, topkd.kernels.small; print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_of_the_lengths_decides_not_the_capacity(dtype: torch.dtype) -> None:
    family = RadixRegisterFamily()
    assert "33792 scores" in str(family.unmet_shape(request(33_793, dtype=dtype)))
    assert family.unmet_shape(request(33_792, dtype=dtype)) is None
    assert "4608 scores" in str(SmallFamily().unmet_shape(request(4609, dtype=dtype)))
    wide = request(1_000_000, dtype=dtype, max_length=4096)
    assert family.unmet_shape(wide) is None
    shapes = family.shapes[dtype.itemsize]
    assert family.variant_on(wide, "sm_90a").shape == shapes[0]
    for smaller, larger in itertools.pairwise(shapes):
        full = smaller.scores(dtype.itemsize)
        assert family.variant_on(request(full, dtype=dtype), "sm_90a").shape == smaller
        assert family.variant_on(request(full + 1, dtype=dtype), "sm_90a").shape == larger


def test_rows_that_begin_anywhere_may_touch_a_vector_more() -> None:
    scores = torch.empty(3, 40_000, dtype=torch.bfloat16)
    assert vectors_of(validate_select(scores[:, :4096], 8)) == 512
    assert vectors_of(validate_select(scores[:, 1:4097], 8)) == 513
    assert vectors_of(validate_select(scores[:, :4096], 8, row_starts=torch.zeros(3, dtype=torch.int32))) == 513
    assert vectors_of(validate_select(scores, 8, group=8, max_length=4096, pooled=True)) == 64


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("size", [2, 4])
def test_the_largest_shape_holds_the_longest_rows_wherever_they_begin(family: RadixRegisterFamily, size: int) -> None:
    assert family.shapes[size][-1].scores(size) >= family.most + 16 // size - 1


def test_how_many_are_selected_is_bounded_by_the_list() -> None:
    family = RadixRegisterFamily()
    assert family.unmet_shape(request(20_000, LIST_CAPACITY)) is None
    assert "k <= 8192" in str(family.unmet_shape(request(20_000, LIST_CAPACITY + 1)))
    assert family.unmet_shape(request(8000, LIST_CAPACITY + 1)) is None, "all elements of a short row"


def test_every_shape_fits_every_device_and_the_common_ones_fit_an_sm_twice() -> None:
    for family in FAMILIES:
        for size in (2, 4):
            for shape in family.shapes[size]:
                assert shape.shared_bytes(size) <= 99 * 1024
                assert shape.threads > 512 or 2 * (shape.shared_bytes(size) + 1024) <= 228 * 1024
                assert shape.list_capacity(size) >= min(shape.scores(size), LIST_CAPACITY)
                assert shape.scores(size) <= 1 << 16, "elements are listed in 16 bits beside 16-bit keys"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 50},
        {"max_length": 5000},
        {"largest": False},
        {"order": "index", "ties": "lowest"},
        {"order": "value"},
        {"ties": "highest"},
        {"pin_newest": True},
        {"drop_neg_inf": True},
        {"values": True},
        {"group": 4},
        {"index_dtype": torch.int64},
        {"lengths": torch.tensor([3, 4], dtype=torch.int32)},
        {"next_n": 2},
        {"row_offsets": torch.tensor([3, 4], dtype=torch.int32)},
    ],
    ids=str,
)
def test_the_short_way_to_arguments_gives_the_same(options: dict[str, Any]) -> None:
    asked = request(100, **options)
    indices = torch.empty(asked.output_shape, dtype=asked.index_dtype)
    job = Job(asked, indices, torch.empty(2, 8, dtype=torch.bfloat16) if asked.values else None)
    arguments = arguments_of(job)
    general = launch_arguments(job)
    any_ = asked.order == "any" and asked.ties == "any"
    assert arguments[len(general) :] == (ANY if any_ else 0, asked.length_bound)
    limit = 3  # `max_length`, which this kernel takes from its own argument
    assert arguments[:limit] + arguments[limit + 1 : len(general)] == general[:limit] + general[limit + 1 :]


def test_what_a_variant_is_compiled_for() -> None:
    variant = RadixRegisterFamily().variant_on(request(100, dtype=torch.float16, group=2), "sm_80")
    assert facts_of(variant) == ("float16", True, 512, 1, False)
    assert facts_of(variant._replace(arch="sm_100a"))[-1] is True
