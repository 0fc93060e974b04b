"""What a kernel family gives on a GPU, compared with the `torch` family in every form that the family serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkd.kernels import select_topk, supports
from topkd.kernels._reference import rank_keys

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "index", "ties": "lowest"},
    {"order": "index", "ties": "highest"},
    {"order": "value", "ties": "lowest", "values": True},
)
POISON = -77


def skip_unless_served(kernel: str, width: int = 8) -> None:
    """Skips where there is no CUDA device, or none that a family serves rows of so many scores on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    unmet = supports(kernel, torch.zeros(1, width, device="cuda"), 2)
    if unmet is not None:
        pytest.skip(unmet)


def forms_of(kernel: str, scores: torch.Tensor, k: int, **options: Any) -> list[dict[str, Any]]:
    """Returns the options of each form that a family serves."""
    return [{**options, **form} for form in FORMS if supports(kernel, scores, k, **options, **form) is None]


def agrees(kernel: str, scores: torch.Tensor, k: int, **options: Any) -> int:
    """Compares a family with `torch` in every form that it serves, bit for bit where the answer is unique.

    Returns:
        How many forms that were.
    """
    keys = rank_keys(scores, largest=options.get("largest", True))
    forms = forms_of(kernel, scores, k, **options)
    for form in forms:
        poison = torch.full((len(scores), k), POISON, dtype=torch.int32, device=scores.device)
        got = select_topk(scores, k, kernel=kernel, out_indices=poison, **form)
        want = select_topk(scores, k, kernel="torch", **form)
        what = f"{kernel}: {tuple(scores.shape)} {scores.dtype}, k={k}, {list(form)}"
        if "ties" not in form:
            assert same_scores(keys, got.indices, want.indices, form.get("row_starts")), what
            continue
        assert torch.equal(got.indices, want.indices), what
        if got.values is not None and want.values is not None:
            assert torch.equal(bits(got.values), bits(want.values)), what
    return len(forms)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Returns values as integers, so that NaNs and zeros of both signs compare too."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def same_scores(keys: torch.Tensor, one: torch.Tensor, other: torch.Tensor, starts: torch.Tensor | None) -> bool:
    """Says whether two answers hold the same scores of each row, the first of them no element twice."""
    ordered = one.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()) or bool((one >= keys.shape[1]).any()) or bool((one < -1).any()):
        return False
    base = 0 if starts is None else starts.clamp(0, keys.shape[1])[:, None].long()
    lowest = torch.iinfo(torch.int64).min

    def scores_of(indices: torch.Tensor) -> torch.Tensor:
        places = (indices.long().clamp(min=0) + base).clamp(max=max(0, keys.shape[1] - 1))
        return torch.where(indices >= 0, keys.gather(1, places).long(), lowest).sort(dim=1).values

    return torch.equal(scores_of(one), scores_of(other))
