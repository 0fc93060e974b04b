"""What calls and kernels cost. Prints; asserts ratios only: no test here knows a machine's speed.

Measurements with real processes are marked `bench` and run by `make bench`; `make bench-kernels` times the kernels on a
GPU, and what it does without one is tested like everything else. docs/bench.md says how each figure is taken, results/
holds the records. May import what tests/e2e may.
"""
