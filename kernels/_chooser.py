"""Which family serves a request: asked for, forced by the environment, measured, or by rule; and why.

`decide` is the rule itself, on families and facts alone, so that `explain` can ask it about devices that are not there.
`Chooser` remembers its answers by everything that they depend on: a choice that was made before costs the host less
than a microsecond.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import _env
from ._cute_compile import failure_count
from ._devices import DeviceKind, kind_of
from ._errors import ArgumentValueError
from ._family import Family
from ._measured import Estimate, table
from ._request import SelectRequest

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_TWINS = {"f16": ("bf16",), "bf16": ("f16",)}
"""Types of the same bytes and the same number of digits, which cost the same."""

SHORT, REGISTERS, LONG, FEW_ROWS = 4608, 33_792, 65_536, 32
"""Elements from which the fixed cost of a large CTA pays (#603), elements whose keys fit a CTA's registers (#512);
elements from which, and rows up to which, a row cut into parts was ahead on an H200 (docs/kernels/split_merge.md)."""

REMEMBERED = 4096
"""Choices that are remembered; then they are all forgotten."""

Unmet = Callable[[Family, SelectRequest], str | None]


class Facts(NamedTuple):
    """What a choice goes by.

    Attributes:
        device: kind of device.
        form: "value" for that order; "index" where order or ties are asked for; "group8" where groups are reduced; else
            "any".
        dtype: "bf16", "f16" or "f32".
        k: elements selected per row.
        rows: rows of the input.
        bound: scores of a row that are read at most: what `max_length` leaves of the capacity.
        elements: what is selected from: `bound`, or the groups in it.
    """

    device: DeviceKind
    form: str
    dtype: str
    k: int
    rows: int
    bound: int
    elements: int


class Verdict(NamedTuple):
    """What there is to say of a family: why not, or what it takes as far as that is measured."""

    family: str
    unmet: str | None
    us: float | None


class Decision(NamedTuple):
    """A choice: `source` is "named", "environment", "measured", "between", "rule" or "only"."""

    family: str
    source: str
    reason: str
    verdicts: tuple[Verdict, ...]


def facts_of(request: SelectRequest, device: DeviceKind | None = None) -> Facts:
    """Return what the choice for a request goes by.

    Args:
        request: from `validate_select`.
        device: the kind of device; None: that of the input.
    """
    if request.order == "value":
        form = "value"
    elif request.order == "index" or request.ties != "any":
        form = "index"
    else:
        form = "group8" if request.group > 1 and not request.pooled else "any"
    capacity = _env.dispatch() == "capacity"
    elements = -(-request.members // request.group) if capacity else request.element_bound
    scores = request.members if capacity else request.length_bound
    bound = elements if request.pooled else scores
    kind = kind_of(request.input.device) if device is None else device
    return Facts(kind, form, DTYPES[request.input.dtype], request.k, request.rows, bound, elements)


def decide(families: Sequence[Family], request: SelectRequest, facts: Facts, unmet: Unmet) -> Decision:
    """Choose a family for a request.

    Args:
        families: all there are, in order; the last serves everything.
        request: from `validate_select`, so that a family that it names can serve it.
        facts: from `facts_of`.
        unmet: what keeps a family from serving a request, or None.

    Raises:
        ArgumentValueError: `TOPKD_KERNEL` names a family that there is not.
    """
    conditions = {family.name: unmet(family, request) for family in families}
    able = [name for name, condition in conditions.items() if condition is None] or [families[-1].name]
    estimate = _estimate(facts)
    us = {} if estimate is None else estimate.us
    verdicts = tuple(Verdict(name, condition, us.get(name)) for name, condition in conditions.items())
    name, source, reason = _pick(able, request, facts, estimate, conditions)
    return Decision(name, source, reason, verdicts)


def _refusals(conditions: dict[str, str | None]) -> list[str]:
    """Return why families cannot serve; those that lack the same thing are named together."""
    names: dict[str, list[str]] = {}
    for name, condition in conditions.items():
        if condition is not None:
            names.setdefault(condition.removeprefix(f"{name} "), []).append(name)
    said = []
    for condition, several in names.items():
        head = f"not {', '.join(several)}: "
        said.append(head + (conditions[several[0]] or "" if len(several) == 1 else f"each {condition}"))
    return said


def _pick(
    able: Sequence[str],
    request: SelectRequest,
    facts: Facts,
    estimate: Estimate | None,
    conditions: dict[str, str | None],
) -> tuple[str, str, str]:
    """Return the family, where the choice comes from, and the reason."""
    if request.kernel != "auto":
        return request.kernel, "named", "asked for by name"
    refused = _refusals(conditions)
    forced = _env.forced_kernel()
    if forced is not None:
        if forced not in conditions:
            known = ", ".join(conditions)
            raise ArgumentValueError(
                "kernel", f"TOPKD_KERNEL is {forced!r}, which is no kernel family; there are {known}"
            )
        if conditions[forced] is None:
            return forced, "environment", "TOPKD_KERNEL asks for it"
    if len(able) == 1:
        return able[0], "only", "; ".join((*refused, "the only family that serves the request"))
    if _env.dispatch() == "active":
        name = next((one for one in _by_active_bound(facts) if one in able), None)
        if name is not None:
            return name, "environment", f"TOPKD_DISPATCH=active: {facts.elements:,} elements a row at most"
    ranked = [name for name in ({} if estimate is None else estimate.us) if name in able]
    # One family's times say nothing of others that can serve the request and were not measured.
    if estimate is not None and ranked and (len(ranked) > 1 or len(able) == 2):
        source = "measured" if estimate.measured else "between"
        return ranked[0], source, "; ".join((_measured_reason(ranked, facts, estimate), *refused))
    order, why = by_rule(facts)
    last = able[-1]
    ordered = [name for name in order if name in able] + [name for name in able if name not in order and name != last]
    reason = f"by rule, not measured on {facts.device.name}: {why}"
    return [*ordered, last][0], "rule", "; ".join((reason, *refused))


def _estimate(facts: Facts) -> Estimate | None:
    """Return what the table says; where it is silent, what it says of the other 16-bit type, then of plain output."""
    for form in (facts.form, "any"):
        for dtype in (facts.dtype, *_TWINS.get(facts.dtype, ())):
            cells = table().cells(facts.device, form, dtype)
            if cells is not None:
                return cells.estimate(facts.k, facts.rows, facts.bound)
    return None


def _measured_reason(ranked: Sequence[str], facts: Facts, estimate: Estimate) -> str:
    best = estimate.us[ranked[0]]
    others = ", ".join(f"{name} {estimate.us[name] / best:.2f} times that" for name in ranked[1:4])
    k, rows, bound = estimate.nearest
    if estimate.measured:
        how = f"measured on {estimate.device}: {best:.2f} us"
    else:
        how = f"about {best:.1f} us by what {estimate.device} measured around it, nearest {rows} x {bound:,}, k = {k}"
    return f"{how}{', ' if others else ''}{others} ({facts.rows} x {facts.bound:,}, k = {facts.k}, {facts.dtype})"


def by_rule(facts: Facts) -> tuple[tuple[str, ...], str]:
    """Return families in the order in which they suit a request where nothing is measured, and why."""
    if facts.elements < SHORT:
        return ("small", "radix_register", "cluster", "radix_wide"), f"rows below {SHORT:,} elements are fixed cost"
    if facts.elements <= REGISTERS:
        return ("cluster", "radix_register", "radix_wide"), f"up to {REGISTERS:,} elements a CTA's registers hold a row"
    if facts.elements >= LONG and facts.rows <= FEW_ROWS:
        return (
            "cluster",
            "split_merge",
            "radix_wide",
        ), "few long rows: one CTA a row would leave most of a device idle"
    return (
        "cluster",
        "radix_wide",
        "split_merge",
    ), "rows enough to fill a device, or too short to be cut: one CTA each"


def _by_active_bound(facts: Facts) -> tuple[str, ...]:
    """Return the seed's dispatch: by the elements that a call says it has at most, whatever the capacity."""
    if facts.elements < SHORT:
        return ("small", "radix_register", "radix_wide")
    return ("radix_register", "radix_wide") if facts.elements <= REGISTERS else ("radix_wide",)


def _key(request: SelectRequest) -> tuple[Any, ...]:
    """Return what a choice depends on. One attribute after the other, because that costs half of an `attrgetter`."""
    scores = request.input
    of_tensors = (
        request.lengths is None,
        request.row_starts is None,
        request.row_offsets is None,
        request.page_table is None,
    )
    of_flags = (
        request.pooled,
        request.pin_newest,
        request.drop_neg_inf,
        request.expand,
        request.largest,
        request.values,
    )
    sizes = (scores.shape, request.k, request.max_length, request.group, request.next_n, request.page_size)
    kinds = (scores.dtype, scores.get_device(), request.index_dtype, request.order, request.ties, request.kernel)
    return sizes, kinds, of_flags, of_tensors


class Chooser:
    """Chooses among families, and remembers.

    Args:
        families: all there are, in order; the last serves everything.
        unmet: what keeps a family from serving a request, or None. It must go by the options, by which tensors are
            there, and by dtype, device and shape of the input: not by strides, addresses or data.
    """

    def __init__(self, families: Sequence[Family], unmet: Unmet) -> None:
        self.families = families
        self._unmet = unmet
        self._by_name = {family.name: family for family in families}
        self._remembered: dict[Any, tuple[Family, str]] = {}
        self._failures = 0

    def choose(self, request: SelectRequest) -> tuple[Family, str]:
        """Return the family that serves a checked request, and the reason for the choice."""
        key = _key(request)
        if self._failures != failure_count():
            self._failures = failure_count()  # a family has no code any more
            self._remembered.clear()
        found = self._remembered.get(key)
        return self._decide(key, request) if found is None else found

    def _decide(self, key: Any, request: SelectRequest) -> tuple[Family, str]:
        decision = decide(self.families, request, facts_of(request), self._unmet)
        if len(self._remembered) >= REMEMBERED:
            self._remembered.clear()
        choice = self._by_name[decision.family], decision.reason
        self._remembered[key] = choice
        return choice
