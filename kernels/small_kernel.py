"""Device code of the `small` family: that of `radix_register`, where it is explained, with CTAs of 256 threads."""

# mypy: ignore-errors

from .radix_register_kernel import RadixRegister


class Small(RadixRegister):
    """The kernel for one dtype and one number of vectors a thread."""
