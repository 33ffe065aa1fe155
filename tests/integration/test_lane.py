"""Sweeps of real trials in real lanes, in the test process and on one shared Ray cluster."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
from omegaconf import OmegaConf

from heats.record import SweepRecord
from heats.tracking.ledger import read_sweep
from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable

APPS = Path(__file__).parents[1] / "apps"

# A busy machine takes half a minute to start a lane.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def run_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SweepRecord]:
    """Runs an app as `python APP OVERRIDES` would, but in this process; gives its sweep."""
    monkeypatch.chdir(tmp_path)

    def run(app: Path, *overrides: str, name: str = "sweep", exit_code: int = 0) -> SweepRecord:
        argv = [str(app), *overrides, f"hydra.sweeper.study_name={name}"]
        monkeypatch.setattr(sys, "argv", argv)
        code: object = 0
        try:
            runpy.run_path(str(app), run_name="__main__")
        except SystemExit as exc:
            code = exc.code
        record = read_sweep(tmp_path / "mlruns" / "sweeps" / name)
        assert code == exit_code, [trial.error for trial in record.trials.values()]
        return record

    return run


@pytest.fixture
def run_probe(run_app: Callable[..., SweepRecord], tmp_path: Path) -> Callable[..., SweepRecord]:
    """Runs sweeps of tests/apps/probe.py, copied to a folder of its own."""
    app = tmp_path / "probe.py"
    shutil.copy(APPS / "probe.py", app)

    def run(case: str, *overrides: str, metric: str = "loss", **how: object) -> SweepRecord:
        OmegaConf.clear_resolver("doubled")  # A process of its own would not know it either.
        return run_app(
            app,
            "-m",
            "hydra/sweeper=heats",
            f"case={case}",
            f"hydra.sweeper.objective.metric={metric}",
            *overrides,
            **how,
        )

    return run


def losses(record: SweepRecord, number: int) -> list[float]:
    return [report.metrics["train_loss"] for report in record.trials[number].reports]


def counted(tmp_path: Path, number: int, rank: int) -> list[int]:
    """The epochs that a rank of a trial began to report, over all its attempts."""
    path = tmp_path / "probes" / f"epochs-{number}-{rank}"
    return [int(line) for line in path.read_text().split()]


def test_third_turn_of_a_lane_trains_bit_for_bit_like_a_process_of_its_own(
    run_app: Callable[..., SweepRecord], project_dir: Path
) -> None:
    app = project_dir / "sweep.py"
    common = ("epochs=4", "scheduler=none", "scaling.resources_per_worker={CPU:1}", "lr=0.01")
    warm = run_app(
        app,
        "-m",
        *common,
        "recipe.config.hidden=16,32,48",
        "hydra/sweeper/sampler=grid",
        "lane.max_concurrent=1",
        name="warm",
    )
    third = warm.trials[2]
    cold = run_app(
        app,
        *common,
        *(override for override in third.overrides),
        "lane.isolation=process",
        name="cold",
    )
    assert len(losses(warm, 2)) == 4
    assert losses(warm, 2) == losses(cold, 0)
    assert losses(warm, 1) != losses(cold, 0)


COMPILED = """
import hydra, ray.train, torch
from torch._dynamo.utils import counters

def loss(x, w):
    return torch.nn.functional.gelu(x @ w).square().mean()

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    counters.clear()
    w = torch.randn(9, cfg.width, requires_grad=True)
    torch.compile(loss)(torch.randn(7, 9), w).backward()
    inductor = counters["inductor"]
    found = {"hits": inductor["fxgraph_cache_hit"], "misses": inductor["fxgraph_cache_miss"]}
    ray.train.report(found)

if __name__ == "__main__":
    main()
"""


def test_what_one_lane_compiled_is_not_compiled_again_in_another(
    run_app: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    app = tmp_path / "compiled.py"
    app.write_text(COMPILED)
    width = random.randrange(10_000)  # Whatever earlier runs have left, this one is new.
    record = run_app(
        app,
        "-m",
        "hydra/sweeper=heats",
        f"+width={width}",
        "+again=1,2",
        "hydra.sweeper.objective.metric=hits",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.isolation=process",
        "hydra.sweeper.lane.max_concurrent=1",
    )
    first, second = (trial.reports[-1].metrics for trial in record.trials.values())
    assert first["misses"] > 0 == first["hits"]
    assert second["hits"] > 0 == second["misses"]


def test_ranks_stop_at_the_same_report_and_share_a_checkpoint_directory(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "reports",
        "x=0,3,2,1",
        "hydra.sweeper.scaling.num_workers=2",
        "hydra.sweeper.asha.max_resource=6",
        "hydra.sweeper.asha.reduction_factor=2",
        "hydra.sweeper.lane.verdict_wait_s=5",
        "hydra.sweeper.lane.max_concurrent=1",
    )
    states = [record.trials[number].state for number in range(4)]
    assert states == [TrialState.COMPLETE, *[TrialState.PRUNED] * 3]
    for trial in record.trials.values():
        reports = [report.index for report in trial.reports]
        assert reports == list(range(1, len(reports) + 1)), "each report counts once, not per rank"
        assert counted(tmp_path, trial.number, 0) == counted(tmp_path, trial.number, 1) == reports
    kept = record.trials[0].best_checkpoint(record.objective)
    assert kept is not None
    assert kept.checkpoint is not None
    assert sorted(os.listdir(kept.checkpoint)) == ["rank-0.json", "rank-1.json"]
    assert not any(record.trials[number].checkpoints for number in (1, 2, 3))


def test_trial_goes_on_from_its_checkpoint_when_its_rank_is_killed(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "dies",
        "x=0,1,2,3",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=2",
    )
    assert record.counts()[TrialState.COMPLETE] == 4
    died = record.trials[1]
    assert [trial.attempts for _, trial in sorted(record.trials.items())] == [1, 2, 1, 1]
    assert [report.resource for report in died.reports] == [1, 2, 3, 4, 5, 6]
    assert [report.metrics["start"] for report in died.reports] == [0, 0, 0, 3, 3, 3]
    assert counted(tmp_path, 1, rank=0) == [1, 2, 3, 4, 5, 6]


def test_preempted_trial_keeps_its_report_and_is_not_charged(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "preempted",
        "x=0,1,2",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra.sweeper.failure.max_retries=0",
    )
    assert record.counts()[TrialState.COMPLETE] == 3
    assert [report.metrics["start"] for report in record.trials[1].reports] == [0, 0, 0, 0, 4, 4]
    assert counted(tmp_path, 1, rank=0) == [1, 2, 3, 4, 5, 6]


def test_lane_of_one_worker_outlives_a_trial_that_raises(
    run_probe: Callable[..., SweepRecord],
) -> None:
    record = run_probe(
        "raises",
        "x=0,1,2",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra.sweeper.failure.max_failures=1",
    )
    states = [record.trials[number].state for number in range(3)]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    failed = record.trials[1]
    assert failed.attempts == 2
    assert [report.resource for report in failed.reports] == [1, 2, 3], "it went on from epoch 3"
    log = Path(failed.log or "").read_text()
    assert len(set(re.findall(r"no data on (\d+)", log))) == 1, "the same process served again"


def test_trial_goes_on_in_another_lane_when_the_process_of_its_own_is_killed(
    run_probe: Callable[..., SweepRecord],
) -> None:
    record = run_probe(
        "loses_its_lane",
        "x=0,1,2",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=1",
        # Of the cluster's 4: no second lane starts until what the first one reserved is free.
        "hydra.sweeper.cluster.num_cpus=4",
        "hydra.sweeper.scaling.resources_per_worker={CPU:3}",
    )
    assert record.counts()[TrialState.COMPLETE] == 3
    assert [trial.attempts for _, trial in sorted(record.trials.items())] == [1, 2, 1]
    assert [report.metrics["start"] for report in record.trials[1].reports] == [0, 0, 0, 3, 3, 3]


def test_trials_of_several_shapes_get_lanes_of_them(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "reports",
        "x=0,1",
        "workers=1,2",
        "hydra.sweeper.scaling.num_workers='${workers}'",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.cluster.num_cpus=4",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra/sweeper/sampler=grid",
    )
    assert record.counts()[TrialState.COMPLETE] == 4
    pids: dict[object, set[str]] = {1: set(), 2: set()}
    for trial in record.trials.values():
        pid = (tmp_path / "probes" / f"pid-{trial.number}").read_text()
        pids[trial.params["workers"]].add(pid)
    assert [len(each) for each in pids.values()] == [1, 1], "both lanes were kept"


def test_lanes_follow_a_cluster_that_grows_and_shrinks(
    run_probe: Callable[..., SweepRecord], ray_cluster: str, tmp_path: Path
) -> None:
    """On 4 CPUs one trial of 3 runs at a time; a second node of 3 comes, and goes again."""

    def wait_for_trials(count: int) -> None:
        deadline_s = time.monotonic() + 120
        while len(list((tmp_path / "probes").glob("epochs-*-0"))) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)

    def join_and_leave() -> None:
        wait_for_trials(1)
        with start_node(ray_cluster, tmp_path / "node.log") as node:
            try:
                wait_for_trials(2)
                drain(ray_cluster, node_with(cpus=3))
                watched = time.monotonic() + 120
                while not (tmp_path / "probes" / "epochs-2-0").exists():
                    assert time.monotonic() < watched
                    time.sleep(0.2)
            finally:
                node.send_signal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(join_and_leave)
        record = run_probe(
            "slow",
            "x=0,1,2",
            "epochs=6",
            "hydra.sweeper.scheduler=none",
            "hydra.sweeper.scaling.resources_per_worker={CPU:3}",
            "hydra.sweeper.cluster.num_cpus=4",
            "hydra.sweeper.failure.max_retries=0",
        )
        watching.result()
    trials = [record.trials[number] for number in range(3)]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 3
    first, second = trials[0].spans[0], trials[1].spans[0]
    assert second[0] < first[1], "they ran at the same time"
    assert [trial.attempts for trial in trials] == [1, 2, 1], "the one on the node that left"
    for trial in trials:
        assert [report.resource for report in trial.reports] == list(range(1, 7))


def node_with(cpus: int) -> str:
    (node,) = [each for each in ray.nodes() if each["Resources"].get("CPU") == cpus]
    return str(node["NodeID"])


def drain(address: str, node_id: str) -> None:
    """Tell the cluster that a node goes away, as a spot market's watcher does."""
    command = ["ray", "drain-node", f"--address={address}", f"--node-id={node_id}"]
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds=120"], check=True)


def start_node(address: str, log: Path) -> subprocess.Popen[bytes]:
    """A node with 3 CPUs that joins the cluster, until it is interrupted."""
    with log.open("wb") as file:
        return subprocess.Popen(
            ["ray", "start", "--block", "--num-cpus=3", "--num-gpus=0", f"--address={address}"],
            stdout=file,
            stderr=file,
        )


def test_population_with_two_workers_goes_on_from_a_donors_checkpoint_by_reference(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "reports",
        "x=1,2,3",
        "hydra/sweeper/sampler=grid",
        "hydra.sweeper.scheduler=pbt",
        "hydra.sweeper.pbt.perturbation_interval=2",
        "hydra.sweeper.scaling.num_workers=2",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra.sweeper.lane.verdict_wait_s=5",
    )
    assert record.counts()[TrialState.COMPLETE] == 3
    exploits = [each for trial in record.trials.values() for each in trial.exploited]
    assert exploits
    for each in exploits:
        donor = Path(record.trials[each.donor].artifact_dir or "")
        assert Path(each.checkpoint).is_relative_to(donor)
    trial = record.trials[exploits[0].trial]
    goes_on = next(r for r in trial.reports if r.time_s > exploits[0].time_s)
    assert goes_on.metrics["start"] == exploits[0].resource
    assert goes_on.metrics["loss"] == exploits[0].params["x"]
    assert trial.reports[-1].resource == 6


def test_promoted_trial_goes_on_in_a_lane_from_its_rung(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "reports",
        "x=0,1,2,3",
        "hydra.sweeper.asha.mode=promote",
        "hydra.sweeper.asha.max_resource=6",
        "hydra.sweeper.asha.reduction_factor=2",
        "hydra.sweeper.lane.verdict_wait_s=5",
        "hydra.sweeper.lane.max_concurrent=1",
    )
    best = record.trials[0]
    assert best.state is TrialState.COMPLETE
    assert [report.resource for report in best.reports] == [1, 2, 3, 4, 5, 6]
    assert best.attempts > 1, "it waited at a rung"
    assert counted(tmp_path, 0, rank=0) == [1, 2, 3, 4, 5, 6], "and no epoch came twice"
    assert [record.trials[number].state for number in (2, 3)] == [TrialState.PRUNED] * 2


def test_ray_train_says_the_same_in_every_isolation(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    told = {}
    for isolation in ("lane", "process", "inline"):
        record = run_probe(
            "tells",
            "x=5",
            f"folder={isolation}",
            f"hydra.sweeper.lane.isolation={isolation}",
            name=isolation,
        )
        assert record.trials[0].state is TrialState.COMPLETE
        told[isolation] = json.loads((tmp_path / isolation / "told-5.json").read_text())
    assert told["lane"] == told["process"] == told["inline"]
    assert told["lane"] == {
        "name": "trial-0",
        "rank": 0,
        "size": 1,
        "local rank": 0,
        "local size": 1,
        "node rank": 0,
        "first checkpoint": True,
        "job": 0,
        "mlflow": ["MLFLOW_RUN_ID"],
        "epoch": 1,
        "reported": [{"loss": 0.5, "epoch": 1}],
    }


def test_trial_that_catches_every_exception_is_stopped_all_the_same(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    record = run_probe(
        "swallows",
        "x=0,1,2",
        "hydra.sweeper.asha.max_resource=6",
        "hydra.sweeper.lane.verdict_wait_s=5",
        "hydra.sweeper.lane.max_concurrent=1",
    )
    assert [record.trials[number].state for number in range(3)] == [
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.PRUNED,
    ]
    assert counted(tmp_path, 1, rank=0) == [1]


def test_trial_that_never_reports_again_is_ended_after_its_grace(
    run_probe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    started = time.monotonic()
    record = run_probe(
        "hangs",
        "x=0,1",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=2",
        "hydra.sweeper.lane.stop_grace_s=1",
        "hydra.sweeper.stop.time_limit_s=45",
    )
    assert time.monotonic() - started < 90
    assert record.trials[0].state is TrialState.COMPLETE
    assert record.trials[1].state is TrialState.PRUNED
    assert len(record.trials[1].reports) == 2
    hanging = Path("/proc", (tmp_path / "probes" / "hanging").read_text())
    deadline = time.monotonic() + 60
    while hanging.exists() and time.monotonic() < deadline:  # Ray ends it when it comes to it.
        time.sleep(0.1)
    assert not hanging.exists()


def test_ranks_that_report_unevenly_fail_their_trial_with_a_reason(
    run_probe: Callable[..., SweepRecord],
) -> None:
    record = run_probe(
        "uneven",
        "hydra.sweeper.scaling.num_workers=2",
        "hydra.sweeper.lane.report_timeout_s=3",
        exit_code=1,
    )
    trial = record.trials[0]
    assert trial.state is TrialState.FAIL
    assert len(trial.reports) == 2
    assert "Rank 0 waits in ray.train.report, while rank 1 has returned" in (trial.error or "")
    assert "probe.py" in (trial.error or "")


def test_trial_that_hangs_is_found_and_named(run_probe: Callable[..., SweepRecord]) -> None:
    record = run_probe(
        "hangs",
        "x=0,1,2",
        "hydra.sweeper.scheduler=none",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra.sweeper.lane.hang_timeout_s=4",
        "hydra.sweeper.failure.max_retries=0",
    )
    states = [record.trials[number].state for number in range(3)]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    error = record.trials[1].error or ""
    assert "The trial hangs in the train function" in error
    assert "in _train" in error


def test_trial_that_leaves_its_program_fails_and_the_next_one_comes(
    run_probe: Callable[..., SweepRecord],
) -> None:
    record = run_probe(
        "exits",
        "x=0,1,2",
        "hydra.sweeper.lane.isolation=inline",
        metric="null",
    )
    states = [trial.state for _, trial in sorted(record.trials.items())]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert "SystemExit: no data" in (record.trials[1].error or "")


def test_app_without_reports_is_judged_by_its_return_value(
    run_probe: Callable[..., SweepRecord],
) -> None:
    record = run_probe("returns", "x=3,1,2", "doubled='${doubled:${x}}'", metric="null")
    assert [record.trials[number].value for number in range(3)] == [9.0, 3.0, 6.0]
    best = record.best()
    assert best is not None
    assert best.params == {"x": 1}
