"""The world on a cluster, with a trace: how long each effect takes, and what is under way meanwhile.

Invariants: a run without a trace has a plain `MpiWorld`, and so pays nothing for this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.effects import AllReduce, Compute, Effect, Forget, Recv, Role, Send, Sleep
from mpitrain.messages import Message, payload_bytes, pushes_of
from mpitrain.mpi.message_header import Incoming
from mpitrain.mpi.messenger import Messenger, Peer
from mpitrain.mpi.operation import Op
from mpitrain.mpi.world import MpiWorld
from mpitrain.system import trace

_SPANS = {
    Send: ("send", trace.COMMUNICATION),
    Recv: ("wait for a message", trace.WAIT),
    Sleep: ("sleep", trace.WAIT),
    AllReduce: ("all-reduce", trace.COMMUNICATION),
}


def make_world(*arguments: Any, **options: Any) -> MpiWorld:
    """The world for a role; the arguments are those of `MpiWorld`."""
    return (TracedMpiWorld if trace.is_on() else MpiWorld)(*arguments, **options)


class TracedMessenger(Messenger):
    """A `Messenger` that records when what it sends and receives is under way."""

    _leaving: Op | None = None

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._landings: dict[int, Callable[..., None]] = {}  # by rank: of the payload that it is sending

    def send(self, rank: int, message: Message) -> None:
        self._leaving = None
        num_bytes = payload_bytes(message)
        super().send(rank, message)
        land = trace.flight(f"{type(message).__name__} to {rank}", bytes=num_bytes)
        if land is not None and self._leaving is not None:
            self._leaving.then(land)

    def _isend(self, buffer: Any, rank: int, tag: int, sent: Callable[[], None] = lambda: None) -> Op:
        self._leaving = super()._isend(buffer, rank, tag, sent)
        return self._leaving

    def _fetch_payload(self, peer: Peer, incoming: Incoming, text: str) -> None:
        name = f"{incoming.kind.name.capitalize()} from {peer.rank}"
        if (land := trace.flight(name, bytes=incoming.payload_bytes)) is not None:
            self._landings[peer.rank] = land
        super()._fetch_payload(peer, incoming, text)

    def _arrived(self, peer: Peer, message: Message) -> None:
        if (land := self._landings.pop(peer.rank, None)) is not None:
            land()
        super()._arrived(peer, message)


class TracedMpiWorld(MpiWorld):
    """An `MpiWorld` whose effects are spans."""

    messenger_class = TracedMessenger

    def run(self, role: Role) -> Any:
        return super().run(_followed(role))

    def _carry_out(self, effect: Compute) -> Any:
        if effect.what == "gradient":
            trace.begin_step(effect.step)
        with trace.span(effect.what, trace.KINDS.get(effect.what, trace.OTHER)):
            return super()._carry_out(effect)

    def _answer(self, effect: Effect) -> Any:
        if isinstance(effect, Forget):
            trace.forget(effect.rank)
        if type(effect) not in _SPANS:
            return super()._answer(effect)
        with trace.span(*_SPANS[type(effect)]):
            answer = super()._answer(effect)
        if isinstance(effect, Recv) and answer is not None:
            for worker, push in pushes_of(*answer):
                trace.hear_push(worker, push.step)
        return answer


def _followed(role: Role) -> Role:
    """The role, with a span for what it does between two effects."""
    answer: Any = None
    while True:
        try:
            with _handling(answer):
                effect = role.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield effect


def _handling(answer: object) -> Any:
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Message)):
        return trace.span("role", trace.OTHER)
    name = f"handle {type(answer[1]).__name__} from {answer[0]}"
    return trace.span(name, trace.SERVER if pushes_of(*answer) else trace.OTHER)
