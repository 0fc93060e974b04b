"""Parity: every family against the reference on the device where it runs, on the calls of Strata's block top-k.

A call is a *decode window* (few queries; only the device knows how many cells each sees) or a *prompt batch* (many
queries that end together, each with its count, and the call says how many cells there are at most). Scores are of
blocks of four cells; what is selected is written as cells, ascending, ties to the lowest block. A family that does not
serve that is asked for the blocks themselves in index order, or else in any order, which is compared as a set of ranks.

Source: Strata, pull request 603, `qsa_topk_parity` and `qsa_topk_active_parity` (#512).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._dispatch import choose, families, run_select, supports, validate_select, warm_select
from ._reference import rank_keys, selected

BLOCK, BLOCKS = 4, 512
"""Cells of a block, and blocks selected."""

PAIRS = (
    (9216, 9216),
    (135_160, 135_160),
    (135_176, 135_176),
    (2100, 262_144),
    (9216, 262_144),
    (32_768, 262_144),
    (262_144, 262_144),
    (300_000, 524_288),
    (524_288, 524_288),
)
"""Contexts and capacities of the self-test, in cells; 135,168 cells are what fits the registers of a CTA."""

QUERIES = {"decode": 8, "prompt": 64}
POISON = -7


def _continuous(scores: Tensor) -> None:
    scores.normal_()


def _levels(scores: Tensor) -> None:
    scores.copy_(torch.randint_like(scores, 64, dtype=torch.int32))


def _equal(scores: Tensor) -> None:
    scores.fill_(1.5)


SCORES: dict[str, Callable[[Tensor], None]] = {"continuous": _continuous, "64 levels": _levels, "equal": _equal}

FORMS: dict[str, dict[str, Any]] = {
    "cells": {"group": BLOCK, "pooled": True, "expand": True, "order": "index", "ties": "lowest"},
    "blocks": {"order": "index", "ties": "lowest"},
    "any order": {},
}
"""What a family is asked for, the first that it serves."""


class Call(NamedTuple):
    """What is selected from; context and capacity in cells."""

    kind: str  # "decode" or "prompt"
    queries: int
    context: int
    capacity: int
    scores: str  # a name of `SCORES`
    dtype: torch.dtype = torch.float32
    blocks: int = BLOCKS

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the scores."""
        return self.queries, self.capacity // BLOCK


class Outcome(NamedTuple):
    """What a family gave.

    Attributes:
        call: what was asked.
        family: who was asked; "auto" too.
        form: in which form, a name of `FORMS`.
        wrong: queries whose answer is not that of the reference.
        note: what is compared besides, "" or "bound".
    """

    call: Call
    family: str
    form: str
    wrong: int
    note: str = ""


class Material:
    """A call's scores, counts and expected answer.

    Args:
        call: what is selected from.
        device: where.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call = call
        rows, width = call.shape
        self.scores = torch.empty(rows, width, dtype=torch.float32, device=device)
        SCORES[call.scores](self.scores)
        self.scores = self.scores.to(call.dtype)
        # Query q of a batch that ends at the context sees all cells up to its own.
        self.lengths = torch.arange(rows, dtype=torch.int32, device=device) + (call.context - rows + 1)
        self.lengths.clamp_(min=1)
        self.counts = (self.lengths + BLOCK - 1) // BLOCK
        valid = torch.arange(width, device=device) < self.counts[:, None]
        self.scores.masked_fill_(~valid, torch.inf)  # whoever reads past a count selects it
        self.keys = rank_keys(self.scores)
        self.best = selected(self.keys, call.blocks, self.counts)

    def options(self, form: str, bounded: bool | None = None) -> dict[str, Any]:
        """Return the arguments of `select_topk` for a form; `bounded` overrules whether the call gives a bound."""
        cells = form == "cells"
        options = {**FORMS[form], "lengths": self.lengths if cells else self.counts}
        if self.call.kind == "prompt" if bounded is None else bounded:
            options["max_length"] = self.call.context if cells else -(-self.call.context // BLOCK)
        return options

    def wrong(self, form: str, indices: Tensor) -> int:
        """Return how many rows of an answer are not what they must be. Synchronises."""
        if form == "cells":
            cells = self.best[:, :, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32, device=indices.device)
            lost = (self.best[:, :, None] < 0) | (cells >= self.lengths[:, None, None])
            want, got = torch.where(lost, -1, cells).flatten(1), indices
        elif form == "blocks":
            want, got = self.best, indices
        else:
            # Places and their number first: all in the row, each once; then the ranks that they have.
            ordered = indices.sort(dim=1).values
            inside = (ordered >= -1) & (ordered < self.counts[:, None])
            once = (ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] == -1)
            legal = inside.all(dim=1) & once.all(dim=1)
            want, got = self._ranks(self.best), self._ranks(torch.where(inside, ordered, -1))
            return int(((want != got).any(dim=1) | ~legal).sum())
        return int((want != got).any(dim=1).sum())

    def _ranks(self, blocks: Tensor) -> Tensor:
        """Return the keys of blocks in descending order, the least of all where there is none."""
        keys = self.keys.gather(1, blocks.clamp(min=0).to(torch.int64))
        return keys.masked_fill_(blocks < 0, torch.iinfo(torch.int32).min).sort(dim=1, descending=True).values


def form_of(family: str, material: Material) -> str | None:
    """Return the first form that a family serves of a call, None without one."""
    for form in FORMS:
        if _serves(family, material, form):
            return form
    return None


def _serves(family: str, material: Material, form: str, bounded: bool | None = None) -> bool:
    """Say whether a family serves a call in a form."""
    return supports(family, material.scores, material.call.blocks, **material.options(form, bounded)) is None


def names(asked: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the families to compare: those asked for, else all of them and "auto".

    Raises:
        ValueError: an unknown name.
    """
    known = ("auto", *(family.name for family in families()))
    for name in asked or ():
        if name not in known:
            raise ValueError(f"there is no kernel family {name!r}; there are {', '.join(known)}")
    return tuple(asked) if asked else known


def compare(call: Call, device: torch.device, asked: Sequence[str] | None = None) -> Iterator[Outcome]:
    """Compare the families that serve a call with the reference; prompt batches also without their bound (#512).

    Yields:
        One outcome for each family, and one with the note "bound" where the call has a bound, if the family serves it
        without: the answer of the same call without it, which must be the same. Synchronises with the device.
    """
    material = Material(call, device)
    for name in names(asked):
        form = form_of(name, material)
        if form is None:
            continue
        yield Outcome(call, name, form, _run(material, name, form, None))
        if call.kind == "prompt" and _serves(name, material, form, False):
            yield Outcome(call, name, form, _run(material, name, form, False), "bound")


def prepare(
    material: Material, family: str, form: str, bounded: bool | None = None
) -> tuple[Callable[[], Any], Tensor]:
    """Return a call of a family that is warm, and where it writes its answer."""
    options = material.options(form, bounded)
    rows, blocks = material.call.queries, material.call.blocks
    columns = blocks * BLOCK if form == "cells" else blocks
    indices = torch.full((rows, columns), POISON, dtype=torch.int32, device=material.scores.device)
    request = validate_select(material.scores, blocks, kernel=family, out_indices=indices, **options)
    warm_select(request)
    return lambda: run_select(request), indices


def _run(material: Material, family: str, form: str, bounded: bool | None) -> int:
    select, indices = prepare(material, family, form, bounded)
    select()
    return material.wrong(form, indices)


def selftest_calls(dtypes: Sequence[torch.dtype], shrink: int = 1) -> Iterator[Call]:
    """Yield the calls of the self-test: each pair as a decode window and as a prompt batch, with each kind of scores.

    Args:
        dtypes: of the scores.
        shrink: divides contexts, capacities and blocks, for machines without a GPU.
    """
    for dtype in dtypes:
        for context, capacity in PAIRS:
            least = max(BLOCK, context // shrink)
            room = -(-max(capacity // shrink, least) // BLOCK) * BLOCK
            for kind, queries in QUERIES.items():
                for scores in SCORES:
                    yield Call(kind, queries, least, room, scores, dtype, max(1, BLOCKS // shrink))


def chosen(material: Material, form: str) -> tuple[str, str]:
    """Return the family that "auto" takes for a call, and the reason."""
    return choose(validate_select(material.scores, material.call.blocks, **material.options(form)))
