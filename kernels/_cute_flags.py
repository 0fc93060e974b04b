"""Bits of the flags word that selection kernels take, and what else host and device code share."""

LARGEST = 1 << 0
POOLED = 1 << 1
PIN_NEWEST = 1 << 2
DROP_NEG_INF = 1 << 3
EXPAND = 1 << 4
TIES_HIGHEST = 1 << 5
ORDER_VALUE = 1 << 6
OUT_INT64 = 1 << 7
OFFSETS_INT64 = 1 << 8
JOBS = 1 << 9
"""A launch of several jobs with as many rows each: `input` is the address of their table, `row_stride` those rows."""

JOB_FIELDS = (
    "input",
    "row_stride",
    "lengths",
    "row_starts",
    "out_indices",
    "out_indices_stride",
    "out_values",
    "out_values_stride",
    "row_offsets",
    "page_table",
    "table_stride",
    "row_to_table",
    "table_starts",
    "tables",
    "entries",
)
"""What an entry of that table holds, each an int64; the jobs share everything else."""

SPARE_CELLS = 16
"""Where cells begin in the spare memory of a launch that was given up; before them is its mark."""
