"""Exact top-k selection on CPU and CUDA tensors, in process.

What lives here: the checks of the contract, the kernel families, the choice between them, plans (calls that are made
again and again) and `merge_topk`. It may
import torch, and nothing else of topkd. No module but `_env` reads the environment.

`__all__` is the public interface. For callers that check, queue and run apart (the server) there is more:
`validate_select` makes a `SelectRequest`, `run_select` runs it, `check_batch_overlap` checks the outputs of a batch,
`run_select_batch` runs it with requests of one `plan_key` as one call, `choose` says which family serves a request and
why, `explain` says it of a shape, `only_enqueues` whether it does no more than enqueue, `warm_select` makes its kernel
ready, `compiles` counts the kernels that became so, `failures` says which families have no code; `validate_merge` and
`run_merge` make and run a `MergeRequest`; `spare_bytes`, `Latch` and `Answer` are for kernels that wait in a stream and
may be given up there, `LaneCall` for who waits for them. `Operators` defines operators for torch, with `SELECT_OPTIONS`
in their schemas and `fake_select` and `outputs` for what they return.

Example:
    >>> import torch
    >>> from topkd.kernels import select_topk
    >>> scores = torch.tensor([[0.5, 2.0, float("nan"), -1.0, 2.0]])
    >>> result = select_topk(scores, 3, order="value", ties="lowest", values=True)
    >>> result.indices.tolist(), result.values.tolist()
    ([[2, 1, 4]], [[nan, 2.0, 2.0]])
"""

from ._cute_compile import compiles as compiles
from ._cute_compile import failures as failures
from ._dispatch import choose as choose
from ._dispatch import kernels, supports
from ._dispatch import only_enqueues as only_enqueues
from ._dispatch import run_select as run_select
from ._dispatch import run_select_batch as run_select_batch
from ._dispatch import validate_select as validate_select
from ._dispatch import warm_select as warm_select
from ._errors import ArgumentTypeError, ArgumentValueError
from ._errors import KernelUnavailableError as KernelUnavailableError
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._family import spare_bytes as spare_bytes
from ._merge import merge_topk
from ._merge import run_merge as run_merge
from ._merge import validate_merge as validate_merge
from ._ops import SELECT_OPTIONS as SELECT_OPTIONS
from ._ops import Operators as Operators
from ._ops import fake_select as fake_select
from ._ops import outputs as outputs
from ._overlap import check_batch_overlap as check_batch_overlap
from ._plan import SelectPlan, plan
from ._precompile import Precompiled as Precompiled
from ._precompile import precompile
from ._precompile import stored as stored
from ._request import MergeRequest as MergeRequest
from ._request import SelectRequest as SelectRequest
from ._request import TopKResult
from ._select import select_topk
from .answer import Answer as Answer
from .lane_call import CallCode as CallCode
from .lane_call import LaneCall as LaneCall
from .latch import Latch as Latch

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "SelectPlan",
    "TopKResult",
    "kernels",
    "merge_topk",
    "plan",
    "precompile",
    "select_topk",
    "supports",
]
