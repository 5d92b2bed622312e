"""The error of a message that its receiver does not expect."""

from mpitrain.effects import Message
from mpitrain.errors import WireError


def out_of_turn(source: int, message: Message, here: str) -> WireError:
    """The error of a message that its receiver (`here`: who and in which state) does not expect now."""
    return WireError(
        f"rank {source} sent {message.kind.name} (step {message.step}, version {message.version}) to {here}, which "
        "does not expect it now; start all ranks with the same version of mpitrain"
    )
