"""No codec."""

from __future__ import annotations

from typing import ClassVar

from mpitrain.codecs.base import Codec
from mpitrain.values import register


@register("codec", "none")
class Uncompressed(Codec):
    """Numbers travel as they are."""

    averages: ClassVar[bool] = True
    sends_all: ClassVar[bool] = True

    @property
    def is_none(self) -> bool:
        return True
