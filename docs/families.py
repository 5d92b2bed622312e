"""The families of strategies: which strategies are of them, and who sends what to whom there.

Pages, tables and pictures are made from here. `rows` of a picture are ranks, the uppermost first; of `arrows` each says
from which rank to which, and what. `tests/test_pictures.py` compares servers and peers with what simulated runs send.
"""

from __future__ import annotations

from typing import NamedTuple

GRADIENT, PARAMETERS, UPDATE, ACTIVATIONS = "gradients", "parameters", "updates, or parameters", "activations"
SUM = "sums of gradients"


class Arrow(NamedTuple):
    """`what` travels from rank to rank; `there_too`: the same way back."""

    source: str
    target: str
    what: str
    there_too: bool = False


class Family(NamedTuple):
    """`waits` and `choose` end the sentences "who waits: ..." and "choose it ..."."""

    key: str
    title: str
    strategies: tuple[str, ...]
    waits: str
    choose: str
    rows: tuple[tuple[str, ...], ...]
    arrows: tuple[Arrow, ...]


def _all_to_all(ranks: tuple[str, ...], what: str) -> tuple[Arrow, ...]:
    return tuple(Arrow(a, b, what, True) for at, a in enumerate(ranks) for b in ranks[at + 1 :])


def _served(servers: tuple[str, ...], workers: tuple[str, ...]) -> tuple[Arrow, ...]:
    up = tuple(Arrow(worker, server, GRADIENT) for server in servers for worker in workers)
    return up + tuple(Arrow(server, worker, PARAMETERS) for server in servers for worker in workers)


_WORKERS = ("worker 1", "worker 2", "worker 3")
FAMILIES = (
    Family(
        "allreduce",
        "Allreduce",
        ("allreduce",),
        "all, for the slowest, at every step",
        "where the ranks are alike and the link is fast: it is the default",
        (("worker 1", "worker 2"), ("worker 4", "worker 3")),
        (
            Arrow("worker 1", "worker 2", SUM),
            Arrow("worker 2", "worker 3", SUM),
            Arrow("worker 3", "worker 4", SUM),
            Arrow("worker 4", "worker 1", SUM),
        ),
    ),
    Family(
        "parameter-servers",
        "Parameter servers that wait",
        ("sync", "backup", "hybrid"),
        "all, or all but the `spare` slowest",
        "where workers are late now and then, die, or come and go",
        (("server 1", "server 2"), _WORKERS),
        _served(("server 1", "server 2"), _WORKERS),
    ),
    Family(
        "asynchronous-servers",
        "Parameter servers that do not wait",
        ("async", "softsync", "ssp", "bounded", "elastic"),
        "nobody, or the fast ones within a bound",
        "where some workers are slower than others, always",
        (("server",), _WORKERS),
        _served(("server",), _WORKERS),
    ),
    Family(
        "local-sgd",
        "Local SGD",
        ("localsgd",),
        "all, every `period` steps",
        "where the link is slow and the ranks are alike",
        (("worker 1", "worker 2"), ("worker 4", "worker 3")),
        (
            Arrow("worker 1", "worker 2", PARAMETERS),
            Arrow("worker 2", "worker 3", PARAMETERS),
            Arrow("worker 3", "worker 4", PARAMETERS),
            Arrow("worker 4", "worker 1", PARAMETERS),
        ),
    ),
    Family(
        "decentralized",
        "Decentralized training",
        ("decentralized",),
        "each for its neighbours, or nobody",
        "where there are many ranks and no place for a server",
        (("peer 1", "peer 2"), ("peer 4", "peer 3")),
        (
            Arrow("peer 1", "peer 2", UPDATE, True),
            Arrow("peer 2", "peer 3", UPDATE, True),
            Arrow("peer 3", "peer 4", UPDATE, True),
            Arrow("peer 4", "peer 1", UPDATE, True),
        ),
    ),
    Family(
        "split-models",
        "Split models",
        ("pipeline", "tensor", "sharded"),
        "all, for one another",
        "where the model, its gradients and its optimizer do not fit into one rank",
        (("stage 1 of A", "stage 2 of A"), ("stage 1 of B", "stage 2 of B")),
        (
            Arrow("stage 1 of A", "stage 2 of A", ACTIVATIONS, True),
            Arrow("stage 1 of B", "stage 2 of B", ACTIVATIONS, True),
            Arrow("stage 1 of A", "stage 1 of B", GRADIENT, True),
            Arrow("stage 2 of A", "stage 2 of B", GRADIENT, True),
        ),
    ),
)
BY_KEY = {family.key: family for family in FAMILIES}
