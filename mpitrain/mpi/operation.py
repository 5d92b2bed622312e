"""One outstanding operation of the progress engine, which every caller that posts one gets.

Invariants: only the polling thread completes an Op; every thread may look at it. This file knows no MPI.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any


class Op:
    """A send, a receive, a call or a collective that is under way.

    `done` turns True once, after every other field is set: `error` is None or the exception, `result` is
    what a call returned, and for receives `status_bytes`, `source` and `tag` describe the message that arrived.
    """

    __slots__ = (
        "acknowledges", "buffer", "callbacks", "cancelled", "comm", "done", "error", "kind", "passive", "peer", "peers",
        "request", "result", "source", "status_bytes", "tag", "what",
    )  # fmt: skip

    def __init__(self, kind: str, buffer: Any = None, peer: int = -1, tag: int = -1, passive: bool = False):
        self.kind = kind
        self.buffer = buffer  # kept alive until MPI is done with it
        self.comm: Any = None  # the communicator on which `peer` is that rank
        self.peer = peer
        self.peers: Any = None  # who rings for it, on this node, if anybody does
        self.acknowledges = True  # a long receive rings the sender, which may wait for that, when it is done
        self.tag = tag
        self.passive = passive
        self.request: Any = None
        self.done = False
        self.cancelled = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.source = peer
        self.status_bytes = 0
        self.what = ""  # what the user called it, for messages
        self.callbacks: list[Callable[[Op], None]] = []

    def __repr__(self) -> str:
        state = f"failed: {self.error!r}" if self.error else "done" if self.done else "outstanding"
        return f"<{self.kind}{self.way and ' '}{self.way}: {state}>"

    @property
    def way(self) -> str:
        """To or from whom a message goes, for people; empty where it is none."""
        way = "to" if self.kind == "send" else "from"
        return f"{way} rank {self.peer}, tag {self.tag}" if self.peer != -1 else ""

    def then(self, callback: "Callable[[Op], None]") -> "Op":
        """Have `callback(op)` called once when this is done, in the polling thread; returns the Op itself.

        Set it before the next poll: on an Op that is already done the callback runs at once, in the calling
        thread.
        """
        self.callbacks.append(callback)
        if self.done:
            self.run_callbacks()
        return self

    def run_callbacks(self) -> None:
        """Call what `then` left here. The thread that takes a callback out of the list calls it, so each runs once."""
        while self.callbacks:
            try:
                callback = self.callbacks.pop(0)
            except IndexError:  # the other thread was faster
                return
            callback(self)


def message_of(buffer: Any) -> Any:
    """What mpi4py gets: tensors go through `as_buffer`, everything else is a message already."""
    if isinstance(buffer, list | bytearray | bytes):
        return buffer
    torch = sys.modules.get("torch")  # no torch in this process, no tensor
    if torch is None or not isinstance(buffer, torch.Tensor):
        return buffer
    from mpitrain.mpi.memory.buffers import as_buffer

    return as_buffer(buffer)


def messages_of_wire(wire_buffer: Any, piece_bytes: int) -> Sequence[Any]:
    """Those for all bytes of a wire buffer, each of at most so many bytes; a single one is made once."""
    if wire_buffer.num_bytes > piece_bytes:
        return [message_of(piece) for piece in wire_buffer.raw.split(piece_bytes)]
    if wire_buffer.message is None:
        wire_buffer.message = message_of(wire_buffer.raw)
    return (wire_buffer.message,)
