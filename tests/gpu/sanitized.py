"""Small selections by one kernel family, compared with the `torch` family: a program for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized FAMILY DTYPE...

FAMILY may be `merge`: small merges by the kernel of `merge_topk`, compared with torch operations. Prints how many
selections it compared; fails if there was none, or if one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from topkd.kernels import merge_topk, select_topk, supports, validate_merge
from topkd.kernels._torch_merge import merge_by_torch

SHAPES = ((2, 37, 5), (1, 4099, 64), (2, 20_000, 512), (1, 70_001, 100))
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "index", "ties": "lowest", "values": True},
    {"order": "value", "ties": "highest", "index_dtype": torch.int64},
    {"largest": False},
    {"group": 8, "pin_newest": True},
)


def selections(family: str, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.Tensor, int, dict[str, Any]]]:
    """Yields what the family serves: rows that begin at unaligned addresses, with lengths of their own."""
    generator = torch.Generator("cuda").manual_seed(5)
    for (rows, width, k), dtype, form in product(SHAPES, dtypes, FORMS):
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


def merges(dtypes: Sequence[torch.dtype]) -> Iterator[bool]:
    """Yields whether each of some merges is that of torch operations: rows within the list and past it, with gaps."""
    generator = torch.Generator("cuda").manual_seed(5)
    kinds = product(((2, 37, 50), (2, 4_099, 300), (1, 20_000, 4_096)), dtypes, (torch.int32, torch.int64))
    for ((rows, count, k), dtype, index_dtype), order in product(kinds, ("index", "value")):
        values = (torch.randn(rows, count + 3, device="cuda", generator=generator) * 4).round().to(dtype)[:, 3:]
        indices = torch.randint(-1, 9 * count, (rows, count), device="cuda", generator=generator).to(index_dtype)
        options: dict[str, Any] = {"order": order, "ties": "highest"}
        got = merge_topk(values, indices, k, **options)
        want = indices.new_empty(rows, k), values.new_empty(rows, k)
        merge_by_torch(validate_merge(values, indices, k, **options), *want)
        yield torch.equal(got.indices, want[0]) and got.values is not None and torch.equal(got.values, want[1])


def main(family: str, *names: str) -> None:
    """Runs them all on scores of some dtypes, such as "bfloat16"."""
    count, dtypes = 0, [getattr(torch, name) for name in names]
    if family == "merge":
        results = list(merges(dtypes))
        if not all(results):
            raise SystemExit(f"merge differs: {results}")
        print(f"merge: {len(results)} selections")
        return
    for scores, k, options in selections(family, dtypes):
        got = select_topk(scores, k, kernel=family, **options).indices
        want = select_topk(scores, k, kernel="torch", **options).indices
        if not same(got, want, scores, options):
            raise SystemExit(f"{family} differs: {tuple(scores.shape)} {scores.dtype} k={k} {options}")
        count += 1
    if not count:
        raise SystemExit(f"{family} serves none of the selections")
    print(f"{family}: {count} selections")


if __name__ == "__main__":
    main(*sys.argv[1:])
