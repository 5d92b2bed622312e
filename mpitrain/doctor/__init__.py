"""Is this machine fit to train on? What `mpitrain doctor` asks before a run, cheapest first.

Invariants: a check says what it saw and what to do, in one line; what is judged (`judge.py`) is apart from
what is measured (`node.py` without MPI, `pairs.py` and `canary.py` over it), so that every verdict has a test that
needs no bad hardware.
"""
