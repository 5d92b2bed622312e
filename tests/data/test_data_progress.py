"""The progress line: often on a terminal, seldom in a log, never for nothing."""

import pytest

from mpitrain.data.write import progress
from mpitrain.data.write.progress import LOG_S, TERMINAL_S, Pace


class Line:
    def __init__(self, is_terminal: bool):
        self.is_terminal = is_terminal
        self.told: list[tuple[str, float | None, float | None]] = []

    def progress(self, text: str, share: float | None, left_s: float | None) -> None:
        self.told.append((text, share, left_s))


@pytest.mark.parametrize(("is_terminal", "every_s"), [(True, TERMINAL_S), (False, LOG_S)])
def test_lines_come_at_most_so_often_and_tell_pace_and_rest(monkeypatch, is_terminal, every_s):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    line = Line(is_terminal)
    pace = Pace(line, "packing", "samples", num_ranks=4)
    for step in range(1, 101):
        now[0] += every_s / 10
        pace(step, 200)
    assert len(line.told) in (9, 10)
    text, share, left_s = line.told[-1]
    done = round(share * 200)
    assert text.startswith(f"packing: {done} of 200 samples a rank, 4 ranks, ")
    assert left_s == pytest.approx((200 - done) * every_s / 10)
    now[0] += 2 * every_s
    pace(101, None)
    assert line.told[-1][0].startswith("packing: 101 samples") and line.told[-1][1:] == (None, None)
