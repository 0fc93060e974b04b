"""What torch's modes ask of an in-process call: to be an operator of a graph, or to have one answer only."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

_mapped = torch._C._functorch.peek_interpreter_stack


def by_operator(scores: object) -> bool:
    """Say whether a call goes through torch's dispatcher: in tracing, under vmap, and for subclasses of Tensor.

    Other calls save the few us that it costs.
    """
    if is_compiling() or _mapped() is not None:
        return True
    return type(scores) is not Tensor and isinstance(scores, Tensor)


def determined(order: str, ties: str) -> tuple[str, str]:
    """Return the order and ties of torch's deterministic mode: one answer bit for bit, where "any" allows several."""
    return "index" if order == "any" else order, "lowest" if ties == "any" else ties
