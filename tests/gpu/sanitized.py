"""Small selections by one kernel family, compared with the `torch` family: a program for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized FAMILY

Prints how many selections it compared; fails if there was none, or if one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from topkd.kernels import select_topk, supports

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((2, 37, 5), (1, 4099, 64), (2, 20_000, 512), (1, 70_001, 100))
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "index", "ties": "lowest", "values": True},
    {"order": "value", "ties": "highest", "index_dtype": torch.int64},
    {"largest": False},
    {"group": 8, "pin_newest": True},
)


def selections(family: str) -> Iterator[tuple[torch.Tensor, int, dict[str, Any]]]:
    """Yields what the family serves: rows that begin at unaligned addresses, with lengths of their own."""
    generator = torch.Generator("cuda").manual_seed(5)
    for (rows, width, k), dtype, form in product(SHAPES, DTYPES, FORMS):
        scores = torch.randn(rows, width + 3, device="cuda", generator=generator).to(dtype)[:, 3:]
        lengths = torch.tensor([width - 11 * row for row in range(rows)], dtype=torch.int32, device="cuda")
        options = {"lengths": lengths, **form}
        if supports(family, scores, k, **options) is None:
            yield scores, k, options


def same(one: torch.Tensor, other: torch.Tensor, scores: torch.Tensor, options: dict[str, Any]) -> bool:
    """Says whether two results hold the same scores, or, where the contract makes them unique, are the same."""
    if "ties" in options:
        return torch.equal(one, other)
    if "group" in options:
        padded = torch.nn.functional.pad(scores.float(), (0, -scores.shape[1] % 8), value=-torch.inf)
        scores = padded.view(scores.shape[0], -1, 8).amax(2)
    return torch.equal(*(scores.float().gather(1, found.long().clamp(min=0)).sort(1).values for found in (one, other)))


def main(family: str) -> None:
    """Runs them all."""
    count = 0
    for scores, k, options in selections(family):
        got = select_topk(scores, k, kernel=family, **options).indices
        want = select_topk(scores, k, kernel="torch", **options).indices
        if not same(got, want, scores, options):
            raise SystemExit(f"{family} differs: {tuple(scores.shape)} {scores.dtype} k={k} {options}")
        count += 1
    if not count:
        raise SystemExit(f"{family} serves none of the selections")
    print(f"{family}: {count} selections")


if __name__ == "__main__":
    main(sys.argv[1])
