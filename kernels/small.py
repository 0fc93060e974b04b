"""The `small` family: `radix_register` with CTAs of 256 threads, for short rows; see there."""

from typing import ClassVar

from .radix_register import RadixRegisterFamily
from .radix_register_shape import Shape


class SmallFamily(RadixRegisterFamily):
    """Selections by one small CTA a row; owns the variants that were compiled."""

    name = "small"
    module: ClassVar[tuple[str, str]] = ("small_kernel", "Small")
    most: ClassVar[int] = 4608
    shapes: ClassVar[dict[int, tuple[Shape, ...]]] = {
        2: (Shape(256, 3),),
        4: (Shape(256, 5),),
    }
