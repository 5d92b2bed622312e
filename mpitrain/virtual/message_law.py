"""What a message costs, in one place: the formulas of a plan and the events of a simulation go by it.

    up to the eager limit     alpha + n beta
    beyond                    3 alpha + (header + answer + n) beta: a header, the receiver's answer, the data

A server's link carries pushes one way and replies the other way, at once. Workers that wait for nobody queue for
either direction, which is a closed network of queues: its mean value analysis gives their rate (Reiser and Lavenberg,
"Mean-value analysis of closed multichain queuing networks", 1980), exact where times are memoryless. Workers that wait
for one another push together, and are replied to together. A long push begins with the server's answer to its header,
which waits behind the replies that the server has begun to send, so then pushes and replies take turns: one direction
rests while the other carries. Where links are shared fairly they do so, too: all pushes end at once.

Invariants: arithmetic only; no function here knows a clock, a rank or a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

POST_S = 50e-6  # what posting and completing one message of the direct algorithm costs over MPI
# What a message costs on the wire beside its payload: the size of mpi/message_header.py's header.
HEADER_BYTES = 160
# A payload's stamps, 64 bytes at either end (model/wire/buffers.py), and its header.
ENVELOPE_BYTES = 2 * 64 + HEADER_BYTES
# The receiver's answer: Open MPI's acknowledgement, 32 bytes, in an Ethernet frame with the headers of TCP and IP.
CONTROL_BYTES = 110


class LinkCost(NamedTuple):
    """What a message between two ranks costs.

    Args:
        alpha_s: seconds a message.
        beta_s: seconds a byte on the wire.
        gamma_s: seconds a byte that is added.
        post_s: seconds of the processor a message of the direct algorithm.
        eager_bytes: longer messages wait until their receiver has answered; 0: none does.
        fair: whether messages share the link, instead of being served first come, first served.
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0
    gamma_s: float = 0.0
    post_s: float = 0.0
    eager_bytes: int = 0
    fair: bool = False

    def waits(self, num_bytes: float) -> bool:
        """Whether so many bytes are sent by a rendezvous."""
        return 0 < self.eager_bytes < num_bytes

    def start_s(self, num_bytes: float) -> float:
        """Seconds until the first byte of a message is there."""
        return (3 if self.waits(num_bytes) else 1) * self.alpha_s

    def role_bytes(self, payload_bytes: float) -> float:
        """On the wire in the direction of the data, of a message of a role: with its header, or headers."""
        num_bytes = payload_bytes + ENVELOPE_BYTES
        return num_bytes + HEADER_BYTES * self.waits(num_bytes)

    def role_s(self, payload_bytes: float) -> float:
        """Seconds of a message of a role on an idle link, from the sender's send to the receiver's last byte."""
        waits = self.waits(payload_bytes + ENVELOPE_BYTES)
        num_bytes = self.role_bytes(payload_bytes) + CONTROL_BYTES * waits
        return self.start_s(payload_bytes + ENVELOPE_BYTES) + num_bytes * self.beta_s

    def takes_turns(self, push_bytes: float, reply_bytes: float) -> bool:
        """Whether a server's two directions rest in turn while workers that wait for one another exchange so much."""
        return self.fair or self.waits(max(push_bytes, reply_bytes) + ENVELOPE_BYTES)

    def gather_s(self, num_workers: float, push_bytes: float, reply_bytes: float) -> float:
        """Seconds until so many workers have pushed to one server and been replied to, the first as soon as all have
        pushed. Who is replied to first pushes first, so where directions take no turns, pushes and replies are under
        way at once but for one of them."""
        heavy, light = sorted(
            (self.role_bytes(one) * self.beta_s for one in (push_bytes, reply_bytes)), reverse=True
        )
        started_s = self.start_s(push_bytes + ENVELOPE_BYTES) + self.start_s(reply_bytes + ENVELOPE_BYTES)
        if self.takes_turns(push_bytes, reply_bytes):
            return started_s + num_workers * (heavy + light)
        return started_s + num_workers * heavy + light


def closed_rate(num_workers: int, think_s: float, stations_s: Sequence[float]) -> float:
    """Rounds a second of all workers together, each of which does something for `think_s` and then visits every
    station, that serves one of them at a time for so long."""
    waiting = [0.0] * len(stations_s)
    rate = 0.0
    for number in range(1, num_workers + 1):
        stays_s = [one_s * (1 + queue) for one_s, queue in zip(stations_s, waiting, strict=True)]
        rate = number / (think_s + sum(stays_s))
        waiting = [rate * stay_s for stay_s in stays_s]
    return rate
