"""What a launcher's exit code means."""

from __future__ import annotations

import pytest

from mpitrain.launch.supervision import code_of
from mpitrain.system.launched.rank_status import READY, RankStatus


def ranks(*codes: int | None, asked: bool = False) -> dict[int, RankStatus]:
    return {rank: RankStatus(rank, "a", "", READY, code=code, asked=asked) for rank, code in enumerate(codes)}


@pytest.mark.parametrize(
    ("flavour", "code", "statuses", "meant"),
    [
        ("openmpi", 9, ranks(None), 9),
        ("srun", 137, ranks(None), 137),
        ("openmpi", -15, {}, 143),
        ("mpich", -9, {}, 137),
        ("mpich", 0, ranks(1), 0),
        ("mpich", 9, ranks(None, None), 137),
        ("mpich", 11, ranks(None, None), 139),
        ("mpich", 15, ranks(None, None), 134),  # SIGABRT of one, SIGKILL of the others
        ("mpich", 15, ranks(None, None, asked=True), 143),
        ("mpich", 15, {}, 143),
        ("mpich", 9, ranks(None, 75, None), 75),  # it ended by itself, the others were killed
        ("mpich", 3, ranks(3, 3), 3),
        ("mpich", 1, ranks(None, None), 1),
        ("mpich", 75, ranks(None), 75),
        ("mpich", 137, ranks(None), 137),
        ("mpich", 255, ranks(None, None, asked=True), 143),  # Intel's, of any signal
        ("mpich", 255, ranks(None, None), 255),
        ("mpich", 255, ranks(None, 75, None), 75),
    ],
)
def test_signals_have_128_more_under_every_launcher(
    flavour: str, code: int, statuses: dict[int, RankStatus], meant: int
) -> None:
    assert code_of(flavour, code, statuses) == meant
