"""Which tests look at which file: writes `table.json`.

    COVERAGE_OUT=FILE python -m pytest -p tests.mutants.choose TESTS    notes which lines each test enters (slow)
    python -m tests.mutants.choose FILE...                               chooses from that, within `LIMIT_S` a file

A test that starts processes is left out: what those do is not seen, and they take long. Of a file those tests come
first that enter many of its lines in little time and little else besides: such a test knows what the file should do.
Every line is entered by up to `ENOUGH` tests. Needs the package coverage (`make coverage` installs it).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mutants.campaign import ROOT, TABLE, files_of

LIMIT_S = 25.0  # of CPU time under coverage, which is a multiple of that without
ENOUGH = 12
# Whole files and laws, before what is chosen.
ALSO = {
    "mpitrain/checkpoint/parts.py": [
        "tests/checkpoint/test_parts.py::test_what_does_not_belong_there_is_told_and_the_checkpoint_before_is_taken",
        "tests/checkpoint/test_parts.py::test_numbers_of_another_run_or_start_are_refused",
    ],
    "mpitrain/roles/peer.py": ["tests/virtual/test_role_laws.py", "tests/virtual/test_peers.py"],
    "mpitrain/roles/out_of_turn.py": ["tests/virtual/test_out_of_turn.py"],
    "mpitrain/roles/failure_detector/silence.py": ["tests/virtual/test_silence.py"],
    "mpitrain/roles/server/worker_state.py": ["tests/virtual/test_worker_state.py"],
    "mpitrain/roles/worker.py": ["tests/virtual/test_worker_side.py"],
    "mpitrain/strategies/ticks.py": ["tests/strategies/test_ticks.py", "tests/virtual/test_schedulers.py"],
    "mpitrain/model/wire/push_codec.py": [
        "tests/model/test_model_laws.py",
        "tests/virtual/test_push_codecs.py",
    ],
    "mpitrain/model/shards/reshard.py": [
        "tests/model/test_model_laws.py",
        "tests/virtual/test_resharding.py",
    ],
    "mpitrain/roles/server/fault_tolerant.py": ["tests/threads/test_last_checkpoint.py"],
    "mpitrain/roles/server/checkpoint_schedule.py": [
        "tests/virtual/test_restarts.py::test_a_checkpoint_gets_whole_however_soon_the_next_one_is_due"
    ],
    "mpitrain/model/optimizers/step_hooks.py": ["tests/virtual/test_step_hooks.py"],
    "mpitrain/model/shards/tabled_shard.py": [
        "tests/model/test_model_laws.py",
        "tests/virtual/test_served_tables.py",
    ],
    "mpitrain/model/optimizers/torch_scheduler.py": [
        "tests/model/test_model_laws.py",
        "tests/virtual/test_schedulers.py",
    ],
    "mpitrain/model/optimizers/several_optimizers.py": ["tests/mpi/test_several_optimizers.py"],
    "mpitrain/model/gradient/sync_batchnorm.py": [
        "tests/mpi/test_features.py::test_batch_statistics_of_all_ranks_are_those_of_one_process_with_the_whole_batch",
        "tests/mpi/test_features.py::test_batch_statistics_of_all_ranks_are_added_up_in_32_bits",
    ],
    "mpitrain/data/read/sample_random.py": ["tests/data/test_read_laws.py"],
    "mpitrain/data/read/ragged.py": ["tests/data/test_read_laws.py"],
    "mpitrain/data/read/prefetch.py": ["tests/data/test_read_laws.py"],
    "mpitrain/data/read/reader.py": ["tests/data/test_read_laws.py"],
    "mpitrain/data/read/chunk_cache.py": ["tests/data/test_read_laws.py"],
    "mpitrain/model/gradient/precision.py": ["tests/model/test_precision_laws.py"],
    "mpitrain/model/replicas/worker_replica.py": [
        "tests/model/test_replica_buffers.py",
        "tests/virtual/test_step_hooks.py",
    ],
    "mpitrain/roles/failure_detector/server_side.py": ["tests/virtual/test_detector_laws.py"],
    "mpitrain/roles/failure_detector/worker_side.py": ["tests/virtual/test_detector_laws.py"],
    "mpitrain/codecs/topk.py": ["tests/codecs/test_laws.py"],
    "mpitrain/model/building/compiling.py": ["tests/model/test_model_laws.py"],
    "mpitrain/model/wire/flat.py": ["tests/model/test_model_laws.py"],
    "mpitrain/model/optimizers/optimizer.py": ["tests/model/test_model_laws.py"],
    "mpitrain/model/gradient/user_code.py": ["tests/model/test_model_laws.py"],
    "mpitrain/roles/replay.py": ["tests/virtual/test_role_laws.py"],
    "mpitrain/strategies/validation_policy.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/strategies/checkpoint_policy.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/strategies/parameter_server/softsync.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/strategies/parameter_server/staleness.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/strategies/sampling/epoch_steps.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/model/replicas/peer_replica.py": ["tests/model/test_model_laws.py"],
    "mpitrain/codecs/qsgd.py": [
        "tests/codecs/test_laws.py::test_what_is_a_level_of_qsgd_already_is_sent_as_it_is_whatever_is_drawn"
    ],
    "mpitrain/model/building/activation_checkpointing.py": ["tests/model/test_model_laws.py"],
    "mpitrain/strategies/schedules.py": ["tests/strategies/test_policy_laws.py"],
    "mpitrain/roles/server/resharding.py": ["tests/virtual/test_resharding.py"],
    "mpitrain/strategies/sampling/dealer.py": ["tests/strategies/test_dealing_laws.py"],
}
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")


class Noting:
    """The plugin: notes what each test enters, and how long it takes."""

    def __init__(self, out: str):
        import coverage

        self.out, self.now, self.times, self.left_out = out, "", dict[str, float](), set[str]()
        self.coverage = coverage.Coverage(
            data_file=f"{out}.lines", config_file=False, source=["mpitrain"], concurrency=["thread"]
        )
        self.coverage.start()
        sys.addaudithook(self._started)

    def _started(self, event: str, _: Any) -> None:
        if self.now and event in _STARTS:
            self.left_out.add(self.now)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around each test."""
        self.now, began_s = item.nodeid, time.process_time()
        self.coverage.switch_context(item.nodeid)
        yield
        self.times[item.nodeid] = time.process_time() - began_s
        self.now = ""
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What fails or is skipped shows nothing."""
        if report.failed or report.skipped:
            self.left_out.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        self.coverage.stop()
        self.coverage.save()
        times = {test: took_s for test, took_s in self.times.items() if test not in self.left_out}
        with open(self.out, "w") as file:
            json.dump({"times": times}, file)


def pytest_configure(config: pytest.Config) -> None:
    """Called where this is a plugin."""
    config.pluginmanager.register(Noting(os.environ["COVERAGE_OUT"]))


def _noted(outs: list[str]) -> tuple[dict[str, float], dict[str, dict[str, set[int]]]]:
    """Seconds of each test, and by file and test the lines that it enters and importing does not."""
    from coverage import CoverageData

    times: dict[str, float] = {}
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for out in outs:
        with open(out) as file:
            times |= json.load(file)["times"]
        data = CoverageData(f"{out}.lines")
        data.read()
        for path in data.measured_files():
            name = path[path.rindex("/mpitrain/") + 1 :]
            contexts = data.contexts_by_lineno(path)
            imported = {line for line, tests in contexts.items() if "" in tests}
            for line, tests in contexts.items():
                for test in tests if line not in imported else ():
                    if test in times:
                        lines[name][test].add(line)
    return times, lines


def chosen(times: dict[str, float], entered: dict[str, set[int]], elsewhere: dict[str, int]) -> list[str]:
    """The tests of a file, the most telling first.

    Args:
        entered: by test, lines of the file; elsewhere: by test, lines of all files.
    """
    counts: dict[int, int] = defaultdict(int)
    found: list[str] = []
    left, spent_s = dict(entered), 0.0

    def worth(test: str) -> float:
        gain = sum(0.5 ** counts[line] for line in left[test] if counts[line] < ENOUGH)
        own = len(left[test]) / elsewhere[test]
        return gain * (0.1 + own) / (0.05 + times[test])

    while left:
        best = max(left, key=worth)
        if worth(best) == 0:
            break
        mine = left.pop(best)
        if spent_s + times[best] > LIMIT_S and found:
            continue
        spent_s += times[best]
        found.append(best)
        for line in mine:
            counts[line] += 1
    return found


def main() -> None:
    """Write the table anew."""
    times, lines = _noted(sys.argv[1:])
    elsewhere: dict[str, int] = defaultdict(int)
    for entered in lines.values():
        for test, those in entered.items():
            elsewhere[test] += len(those)
    table = {path: chosen(times, lines.get(path, {}), elsewhere) for path in files_of(ROOT)}
    table |= {path: [*tests, *table.get(path, [])] for path, tests in ALSO.items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print({path: len(tests) for path, tests in table.items()})


if __name__ == "__main__":
    main()
