"""Codecs: tensors to few bytes and back, with what was not sent kept for the next message.

    encoder = ThresholdEncoder(density=1e-3)
    message = encoder.encode([Part(gradient, layout)])   # uint8, host memory; message.numel() is what travels
    add_message(message, [Part(sums, layout)], weight)   # on any rank that knows the layout

An encoder belongs to one stream from one worker and has `state` and `restore`; decoding has no state. Nothing
here knows MPI, clocks or strategies: `model/codec_registry.py` makes the encoder that a strategy's codec names, and
`training/synchronous/codec_hooks.py` carries messages between data-parallel ranks.
"""

from mpitrain.codecs.decode import add_message, write_message
from mpitrain.codecs.eightbit import EightBitEncoder
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.floats import BFloat16Encoder, Float16Encoder
from mpitrain.codecs.layout import Field, Layout, Part, make_plan, whole
from mpitrain.codecs.message_format import message_statistics
from mpitrain.codecs.onebit import OneBitEncoder
from mpitrain.codecs.powersgd import PowerSgdEncoder
from mpitrain.codecs.qsgd import QsgdEncoder
from mpitrain.codecs.threshold import ThresholdEncoder
from mpitrain.codecs.topk import TopKEncoder

__all__ = [
    "BFloat16Encoder", "EightBitEncoder", "Encoder", "Field", "Float16Encoder", "Layout", "OneBitEncoder", "Part",
    "PowerSgdEncoder", "QsgdEncoder", "ThresholdEncoder", "TopKEncoder", "add_message", "make_plan",
    "message_statistics", "whole", "write_message",
]  # fmt: skip
