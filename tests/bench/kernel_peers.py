"""What is measured: `auto` and every kernel family of topkd, torch.topk, and peers that are installed.

An implementation's name is what the record calls it. `NAME+FORM` is a family with an output form of
`kernel_cells.FORMS`. A new kernel family needs no line here: `contenders` asks `topkd.kernels`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.bench.kernel_cells import FORMS
from topkd.kernels import KernelUnavailableError, _dispatch, kernels, run_select, supports, validate_select, warm_select
from topkd.kernels._family import Family, Job


class Prepared(NamedTuple):
    """Calls that are ready, one for each input; all write the same output."""

    calls: list[Callable[[], object]]
    finish: Callable[[], object] = lambda: None  # puts the answer where it is looked for, if a call does not


class Contender(NamedTuple):
    """An implementation: `prepare(inputs, k, indices)` returns its calls, or the reason why there are none."""

    name: str
    prepare: Callable[[Sequence[Tensor], int, Tensor], Prepared | str]
    capturable: bool = True

    @property
    def form(self) -> str:
        """Output form."""
        return self.name.partition("+")[2]


PEERS = ("torch", "cudnn")
"""Names of what is not topkd: torch.topk, and the cuDNN frontend's IndexerTopK where it is installed."""


def contenders(families: Sequence[str], peers: Sequence[str], forms: Sequence[str] = ("",)) -> Iterator[Contender]:
    """Yield the implementations to measure.

    Args:
        families: names of kernel families and "auto"; "all" are both "auto" and all that can be captured in graphs;
            "none" are none.
        peers: of `PEERS`, or "all", or "none".
        forms: output forms.
    """
    known = {family.name: family for family in _dispatch.families()}
    names = ["auto", *(name for name, one in known.items() if one.capturable)] if "all" in families else families
    if names == ["none"]:
        names = []
    for form in forms:
        for name in names:
            if name != "auto" and name not in known:
                raise SystemExit(f"there is no kernel family {name!r}; there are auto, {', '.join(kernels())}")
            title = "torch_family" if name == "torch" else name  # "torch" is torch.topk
            title += f"+{form}" if form else ""
            if form != "pdl":
                capturable = name == "auto" or known[name].capturable
                yield Contender(title, partial(_ours, name, FORMS[form]), capturable)
            elif name != "auto" and "dependent" in inspect.signature(known[name].run).parameters:
                yield Contender(title, partial(_dependent, known[name]))
    if not set(peers) <= {*PEERS, "all", "none"}:
        raise SystemExit(f"there are the peers {', '.join(PEERS)}, not {', '.join(peers)}")
    if {"torch", "all"} & set(peers):
        yield Contender("torch", _torch)
    if {"cudnn", "all"} & set(peers) and importlib.util.find_spec("cudnn") is not None:
        yield Contender("cudnn", _cudnn)


def _ours(kernel: str, options: dict[str, Any], inputs: Sequence[Tensor], k: int, indices: Tensor) -> Prepared | str:
    """Calls of one of our families, made ready."""
    unmet = supports(kernel, inputs[0], k, **options)
    if unmet is not None:
        return unmet
    requests = [validate_select(scores, k, out_indices=indices, kernel=kernel, **options) for scores in inputs]
    try:
        warm_select(requests[0])
    except KernelUnavailableError as error:
        return str(error)
    return Prepared([partial(run_select, request) for request in requests])


def _dependent(family: Family, inputs: Sequence[Tensor], k: int, indices: Tensor) -> Prepared | str:
    """Calls of one of our families with programmatic dependent launch."""
    ready = _ours(family.name, {}, inputs, k, indices)
    if isinstance(ready, str):
        return ready
    run: Any = family.run
    jobs = [Job(validate_select(scores, k, kernel=family.name), indices, None) for scores in inputs]
    return Prepared([partial(run, [job], dependent=True) for job in jobs])


def _torch(inputs: Sequence[Tensor], k: int, indices: Tensor) -> Prepared:
    """torch.topk, unsorted, which writes values and int64 indices."""
    out = (torch.empty(indices.shape, dtype=inputs[0].dtype, device=indices.device), indices.to(torch.int64))
    calls = [partial(torch.topk, scores, k, dim=1, sorted=False, out=out) for scores in inputs]
    return Prepared(calls, partial(indices.copy_, out[1]))


def _cudnn(inputs: Sequence[Tensor], k: int, indices: Tensor) -> Prepared | str:
    """The cuDNN frontend's IndexerTopK, indices only."""
    try:
        from cudnn.deepseek_sparse_attention import IndexerTopK
    except ImportError as error:
        return f"it cannot be imported: {error}"
    rows, width = inputs[0].shape
    lengths = torch.full((rows,), width, dtype=torch.int32, device=indices.device)
    try:
        plan = IndexerTopK(inputs[0], lengths, k, return_val=False)
        plan.check_support()
        plan.compile()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error)
    workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=indices.device)
    return Prepared(
        [partial(plan.execute, scores, lengths, out_indices=indices, workspace=workspace) for scores in inputs]
    )
