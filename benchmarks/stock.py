"""Plain Ray programs that do what a heats sweep of trivial trials does.

`python -m benchmarks.stock PROGRAM COUNT OUT [FIRST]` runs one; its result is in the file OUT, as
JSON, and the time of its first report, since the epoch, in the file FIRST:

- `cold COUNT`: so many Tune trials, each fitting a `TorchTrainer` of its own, as Ray's guide
  "Hyperparameter Tuning with Ray Tune" (Train V2) shows. The wall-clock time of each trial's end.
- `reused COUNT`: so many trials of a Tune function, with `reuse_actors=True`. The same.
- `reports COUNT`: one `TorchTrainer` run, so many reports. The seconds that each took.

Nothing is tuned: logging, storage and polling are as Ray has them, in a temporary folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from benchmarks.machine import num_cpus
from benchmarks.trivial import NUM_REPORTS, note_first, train

ONE_WORKER = ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})


class EndTimes(tune.Callback):  # type: ignore[misc] # Ray's class is not checked.
    """Notes when each trial ended, in wall-clock seconds since the epoch."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Note the time."""
        del iteration, trials, trial
        self.times_s.append(time.time())


def fit_trainer(config: dict[str, Any]) -> None:
    """One Tune trial: a Train run with one worker, whose reports go on to Tune."""
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ONE_WORKER,
        run_config=ray.train.RunConfig(
            name=f"train-{tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def report_to_tune(config: dict[str, Any]) -> None:
    """One Tune trial that needs no other process: it reports, and that is all."""
    note_first(config)
    for _ in range(NUM_REPORTS):
        tune.report({"loss": config["lr"]})


def tune_trials(
    trainable: Any, count: int, storage: str, fixed: dict[str, str], **settings: Any
) -> list[float]:
    """Wall-clock time of each trial's end, in order."""
    ends = EndTimes()
    results = tune.Tuner(
        trainable,
        param_space={"lr": tune.loguniform(1e-4, 1e-1), "storage": storage, **fixed},
        tune_config=tune.TuneConfig(num_samples=count, **settings),
        run_config=tune.RunConfig(storage_path=storage, verbose=0, callbacks=[ends]),
    ).fit()
    if results.errors or len(ends.times_s) != count:
        sys.exit(f"{len(ends.times_s)} of {count} trials ended well: {results.errors}")
    return ends.times_s


def main(program: str, count: int, out: Path, first: str | None = None) -> None:
    """Run one of the programs on all CPUs that this process may use."""
    fixed = {} if first is None else {"first": first}
    ray.init("local", num_cpus=num_cpus(), log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as storage:
        if program == "cold":
            # The process that calls fit() only waits: all CPUs are for workers, as in a lane.
            trainable = tune.with_resources(fit_trainer, {"CPU": 0, "memory": 1})
            ends = tune_trials(trainable, count, storage, fixed, max_concurrent_trials=num_cpus())
            out.write_text(json.dumps(ends), encoding="utf-8")
        elif program == "reused":
            ends = tune_trials(report_to_tune, count, storage, fixed, reuse_actors=True)
            out.write_text(json.dumps(ends), encoding="utf-8")
        elif program == "reports":
            TorchTrainer(
                train,
                train_loop_config={"lr": 0.1, "num_reports": count, "out": str(out)},
                scaling_config=ONE_WORKER,
                run_config=ray.train.RunConfig(storage_path=storage),
            ).fit()
        else:
            sys.exit(f"Unknown program {program!r}. Known: cold, reused, reports.")
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve(), *sys.argv[4:])
