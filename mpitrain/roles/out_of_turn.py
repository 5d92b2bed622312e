"""The error of a message that its receiver does not expect."""

from mpitrain.errors import WireError
from mpitrain.messages import Message


def out_of_turn(source: int, message: Message, here: str) -> WireError:
    """The error of a message that its receiver (`here`: who and in which state) does not expect now."""
    known = [f"{name} {getattr(message, name)}" for name in ("step", "version") if hasattr(message, name)]
    place = f" ({', '.join(known)})" if known else ""
    return WireError(
        f"rank {source} sent {message.kind.name}{place} to {here}, which does not expect it now; start all "
        "ranks with the same version of mpitrain"
    )
