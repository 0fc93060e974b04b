"""Bits of the flags word that selection kernels take; host and device code share them."""

LARGEST = 1 << 0
POOLED = 1 << 1
PIN_NEWEST = 1 << 2
DROP_NEG_INF = 1 << 3
EXPAND = 1 << 4
TIES_HIGHEST = 1 << 5
ORDER_VALUE = 1 << 6
OUT_INT64 = 1 << 7
OFFSETS_INT64 = 1 << 8
