"""Ranks as threads of one process: queues in place of messages, a meeting in place of a collective.

hub.py      what all ranks of a run share: their inboxes, where they meet, and the first failure
ranks.py    one rank among the others, as the runtime over MPI has it
world.py    answers the effects of roles, in real time
sums.py     sums of tensors between threads, each of which adds up a part
draws.py    random numbers that depend on no other thread
"""
