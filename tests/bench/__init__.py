"""What calls cost. Measures with real processes, prints, and asserts ratios only: no test here knows a machine's speed.

Everything is marked `bench` and run by `make bench`; docs/bench.md says how each figure is taken. May import what
tests/e2e may.
"""
