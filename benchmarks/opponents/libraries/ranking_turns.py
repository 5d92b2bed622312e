"""How the workers of every library of `sparse_tables.py` are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def answer_turns(way: Any, batch: int, meet: Callable[[], Any]) -> Callable[[int], float]:
    """Answers with the samples a second of both workers in so many steps. `way`: None on a server, which only meets the
    others."""

    def answer(num_steps: int) -> float:
        meet()
        began_s = time.perf_counter()
        if way is not None:
            way.run(num_steps)
        meet()
        return 2 * batch * num_steps / (time.perf_counter() - began_s)

    return answer
