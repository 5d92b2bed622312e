"""Ray Tune: one process per core, kept for the next trial (`reuse_actors`). `how`: `random` trains what was drawn to
the end, `halving` stops it by its ASHA scheduler."""

import os
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from digits_trial import account, trial
from measuring.beside import answer_with, settings
from ray import tune

told = settings()
ray.init(
    num_cpus=told["workers"], include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20
)


def trainable(config):
    lr, batch_size = config["drawn"]
    for accuracy in trial(told, config["seed"], lr, batch_size):
        tune.report({"accuracy": accuracy})


def sweep(seed, drawn):
    """One sweep of what was drawn."""
    scheduler = None
    if told["how"] == "halving":
        scheduler = tune.schedulers.ASHAScheduler(
            max_t=told["epochs"], grace_period=1, reduction_factor=told["reduction"], stop_last_trials=False
        )
    tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"drawn": tune.grid_search(drawn), "seed": seed},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True
        ),
        run_config=tune.RunConfig(storage_path=os.path.join(told["folder"], f"runs-{seed}"), verbose=0),
    ).fit()  # fmt: skip
    return account(Path(told["folder"]), told["workers"])


answer_with(sweep)
ray.shutdown()
