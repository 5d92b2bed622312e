"""Codecs: tensors to few bytes and back, with what was not sent kept for the next message.

    encoder = ThresholdEncoder(density=1e-3)
    message = encoder.encode([Part(gradient, layout)])   # uint8, host memory; message.numel() is what travels
    add_message(message, [Part(sums, layout)], weight)   # on any rank that knows the layout

A codec is one file: the value that stands in texts, its encoder, and the decoders of its kinds of messages; its row in
`strategies/registry.py` makes it known. An encoder belongs to one stream from one worker and has `state` and `restore`;
decoding has no state. Nothing here knows MPI, clocks or strategies: `model/wire/codec_registry.py` makes the encoder of
a value, and `training/synchronous/codec_hooks.py` carries messages between data-parallel ranks.
"""

from mpitrain.codecs.decode import add_message, message_statistics, write_message
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Field, Layout, Part, make_plan, whole

__all__ = [
    "Encoder", "Field", "Layout", "Part", "add_message", "make_plan", "message_statistics", "whole", "write_message",
]  # fmt: skip
