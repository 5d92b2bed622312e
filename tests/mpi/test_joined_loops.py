"""What the plug-ins for frameworks stand on, without a framework: `tests/clients` runs those."""

import pytest

from tests.mpi.cases import call, launch_calls


@pytest.mark.parametrize(("ranks", "name"), [(3, "servers"), (2, "one_after_another")])
def test_workers_have_a_group_of_their_own(tmp_path, ranks, name):
    """Beside the messages of servers; what is written beside a framework's checkpoint is found, copied and removed."""
    launch_calls(ranks, "joined_loops", tmp_path, [call(name)]).check()
