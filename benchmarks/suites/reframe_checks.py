"""ReFrame (4.10, `pip install ReFrame-HPC`): throughput of a job under several strategies, from the line that a run
prints.

    reframe -C benchmarks/suites/reframe_settings.py -c benchmarks/suites/reframe_checks.py --system here:local -r
    reframe -C benchmarks/suites/reframe_settings.py -c benchmarks/suites/reframe_checks.py --system here:slurm -r

`-S job_file=/path/to/job.py`, `-S steps=500` and `-S data=yes` (the job's own data in place of random samples; give
`-S folder=DIR`, which its paths are relative to) change what is measured, and `-n` chooses among the strategies.
"""

from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import (
    parameter,
    performance_function,
    run_after,
    run_before,
    sanity_function,
    variable,
)

JOB = Path(__file__).resolve().parents[2] / "jobs" / "digits.py"


@rfm.simple_test
class Throughput(rfm.RunOnlyRegressionTest):
    """Samples per second of one strategy; `setting`: its text, and ranks (workers and servers)."""

    setting = parameter(
        [("allreduce", 2), ("sync(servers=1)", 3), ("async(servers=1)", 3), ("pipeline(stages=2)", 2)],
        fmt=lambda pair: f"{pair[0]}-{pair[1]}",
    )
    job_file = variable(str, value=str(JOB))
    steps = variable(int, value=100)
    data = variable(bool, value=False)
    folder = variable(str, value=".")

    valid_systems = ["*"]
    valid_prog_environs = ["builtin"]
    sourcesdir = None

    @run_after("setup")
    def start_ranks(self):
        """A launcher of ReFrame's starts the ranks, or `mpitrain launch` where there is none."""
        strategy, ranks = self.setting
        alone = self.current_partition.launcher_type.registered_name == "local"
        self.num_tasks = 1 if alone else ranks
        self.executable = "mpitrain"
        launch = ["launch", "-n", str(ranks)] if alone else []
        self.executable_opts = [
            *launch,
            "train",
            self.job_file,
            "--strategy",
            f"'{strategy}'",
            "--steps",
            str(self.steps),
        ]
        self.executable_opts += [
            "--quiet",
            "--run-dir",
            '"$RUN_DIR"',
            *([] if self.data else ["--synthetic"]),
        ]
        self.prerun_cmds = ["RUN_DIR=$PWD/run", f"cd {self.folder}"]
        self.job_time_limit = "10m"

    @run_before("run")
    def set_launcher_options(self):
        """How this site's srun starts MPI."""
        self.job.launcher.options = self.current_partition.extras.get("srun", [])

    def fom(self, key):
        """The value of a key of the last figure of merit."""
        return sn.extractall(rf"^FOM .*\b{key}=(?P<value>\S+)", self.stdout, "value")[-1]

    @sanity_function
    def is_what_was_asked(self):
        asked = "".join(self.setting[0].split())
        return sn.all([sn.assert_eq(self.fom("status"), "ok"), sn.assert_eq(self.fom("strategy"), asked)])

    @performance_function("samples/s")
    def samples_per_second(self):
        return sn.extractall(r"^FOM samples_per_second=(\S+)", self.stdout, 1, float)[-1]

    @performance_function("samples/s")
    def samples_per_second_per_worker(self):
        return sn.extractall(r"samples_per_second_per_worker=(\S+)", self.stdout, 1, float)[-1]

    @performance_function("of the mean")
    def spread(self):
        return sn.extractall(r" spread=(\S+)", self.stdout, 1, float)[-1]
