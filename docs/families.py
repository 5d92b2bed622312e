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
    """`strategies`: by name, who waits under it. `waits`, of the family as a whole, and `choose` end the sentences "who
    waits: ..." and "choose it ..."."""

    key: str
    title: str
    strategies: dict[str, str]
    waits: str
    choose: str
    rows: tuple[tuple[str, ...], ...]
    arrows: tuple[Arrow, ...]


def _ring(ranks: tuple[str, ...], what: str, there_too: bool = False) -> tuple[Arrow, ...]:
    return tuple(Arrow(a, b, what, there_too) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True))


def _served(servers: tuple[str, ...], workers: tuple[str, ...]) -> tuple[Arrow, ...]:
    up = tuple(Arrow(worker, server, GRADIENT) for server in servers for worker in workers)
    return up + tuple(Arrow(server, worker, PARAMETERS) for server in servers for worker in workers)


_WORKERS = ("worker 1", "worker 2", "worker 3")
_FOUR, _PEERS = (*_WORKERS, "worker 4"), ("peer 1", "peer 2", "peer 3", "peer 4")
_ALL, _NOBODY, _ONE_ANOTHER = "all, for the slowest, at every step", "nobody", "all, for one another"
_EVERY_PERIOD = "all, every `period` steps"
FAMILIES = (
    Family(
        "allreduce",
        "Allreduce",
        {"allreduce": _ALL},
        _ALL,
        "where the ranks are alike and the link is fast: it is the default",
        (("worker 1", "worker 2"), ("worker 4", "worker 3")),
        _ring(_FOUR, SUM),
    ),
    Family(
        "parameter-servers",
        "Parameter servers that wait",
        {"sync": _ALL, "backup": "all but the `spare` slowest", "hybrid": _ALL},
        "all, or all but the `spare` slowest",
        "where workers are late now and then, die, or come and go",
        (("server 1", "server 2"), _WORKERS),
        _served(("server 1", "server 2"), _WORKERS),
    ),
    Family(
        "asynchronous-servers",
        "Parameter servers that do not wait",
        {
            "async": _NOBODY,
            "softsync": "nobody; with `blocking=True` whoever has pushed, for the update",
            "ssp": "whoever is more than `bound` pushes ahead of the slowest",
            "bounded": "whoever would make another's gradient older than `staleness`",
            "elastic": _NOBODY,
        },
        "nobody, or the fast ones within a bound",
        "where some workers are slower than others, always",
        (("server",), _WORKERS),
        _served(("server",), _WORKERS),
    ),
    Family(
        "local-sgd",
        "Local SGD",
        {"localsgd": _EVERY_PERIOD},
        _EVERY_PERIOD,
        "where the link is slow and the ranks are alike",
        (("worker 1", "worker 2"), ("worker 4", "worker 3")),
        _ring(_FOUR, PARAMETERS),
    ),
    Family(
        "decentralized",
        "Decentralized training",
        {"decentralized": "each for its neighbours; with `asynchronous=True` nobody, but where all meet"},
        "each for its neighbours, or nobody",
        "where there are many ranks and no place for a server",
        (("peer 1", "peer 2"), ("peer 4", "peer 3")),
        _ring(_PEERS, UPDATE, True),
    ),
    Family(
        "split-models",
        "Split models",
        dict.fromkeys(("pipeline", "tensor", "sharded"), _ONE_ANOTHER),
        _ONE_ANOTHER,
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
