"""Errors about arguments.

    TypeError
      ArgumentTypeError     a wrong Python type or dtype
    ValueError
      ArgumentValueError    anything else that is wrong with an argument

Both name the argument, its value and what is allowed, in the message and as attributes. Beside them:

    RuntimeError
      KernelUnavailableError    a family's code can be neither loaded nor compiled; the family says so from then on
"""

from typing import Any

import torch

_LONGEST = 120


def describe(value: object) -> str:
    """Describe an argument's value for an error text; a tensor by its layout, never by its data."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided:
            kind = "nested" if value.is_nested else f"of layout {value.layout}"
            return f"a tensor {kind}, dtype {value.dtype}, device {value.device}"
        layout = f"shape {tuple(value.shape)}, dtype {value.dtype}, stride {tuple(value.stride())}"
        return f"a tensor of {layout}, device {value.device}"
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        text = f"an integer of {value.bit_length()} bits"
    elif isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        text = repr(value)
    else:
        text = f"an object of type {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class _ArgumentError(Exception):
    """What the two classes share.

    Attributes:
        argument: name of the parameter at fault.
        selection: place of the selection in its batch, or None where there is no batch.
    """

    argument: str
    selection: int | None

    def __init__(self, argument: str, message: str, selection: int | None = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.selection = selection

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, str(self), self.selection)


class ArgumentTypeError(_ArgumentError, TypeError):
    """An argument of a wrong Python type or dtype."""


class ArgumentValueError(_ArgumentError, ValueError):
    """An argument whose value, shape, stride, device or combination with others is wrong."""


class KernelUnavailableError(RuntimeError):
    """The code of a kernel family can be neither loaded nor compiled; nothing was launched."""


def type_error(argument: str, value: object, allowed: str) -> ArgumentTypeError:
    """Build the error for `argument`, which is `value` and must be `allowed`."""
    return ArgumentTypeError(argument, f"{argument} is {describe(value)}; it must be {allowed}")


def value_error(argument: str, value: object, allowed: str) -> ArgumentValueError:
    """Build the error for `argument`, which is `value` and must be `allowed`."""
    return ArgumentValueError(argument, f"{argument} is {describe(value)}; it must be {allowed}")
