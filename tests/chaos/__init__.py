"""`python -m tests.chaos`: clients with lanes, and workers, are killed at random; nothing may be wrong or hang.

`engine.py` is a client process, `work.py` what it calls and how it is checked, `run.py` what kills and judges.
"""
