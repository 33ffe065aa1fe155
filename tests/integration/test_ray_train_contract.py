"""What `ray.train` gives a train function: in a lane the same as in a plain `TorchTrainer`.

The functions are those of tests/apps/contract.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import ray.data
import ray.train
import ray.train.collective
import ray.train.torch
from ray import cloudpickle
from tests.apps import contract

from heats.tracking.ledger import read_sweep
from heats.trial import TrialState

if TYPE_CHECKING:
    from heats.record import SweepRecord

_, COMPLETE, PRUNED, _ = TrialState
CASES = tuple(contract.CASES)
APP = Path(contract.__file__)
TRAINER_SIDE = "for the program that makes a trainer; here the sweep's settings take its place: "
NOT_IN_A_TRAIN_FUNCTION = {
    "BackendConfig": TRAINER_SIDE + "a lane has torch's process group",
    "CheckpointConfig": TRAINER_SIDE + "checkpoint.keep_best",
    "ControllerError": "raised by fit(); a sweep retries the trial (failure.max_retries)",
    "DataConfig": TRAINER_SIDE + "data.datasets_to_split",
    "FailureConfig": TRAINER_SIDE + "failure.max_retries, failure.max_failures",
    "LoggingConfig": TRAINER_SIDE + "Ray Train's own logs, which a lane keeps quiet",
    "NCCLHangError": "raised by fit(); a sweep finds hangs itself (lane.hang_timeout_s)",
    "PreemptionError": "raised by fit(); a sweep retries the trial (failure.max_retries)",
    "PreemptionInfo": "only seen while a node is being taken away: see test_ray_contract.py",
    "Result": "given by fit(); a sweep's results are in its ledger and in MLflow",
    "RunConfig": TRAINER_SIDE + "tracking, checkpoints, lane",
    "ScalingConfig": TRAINER_SIDE + "scaling",
    "SyncConfig": "of Ray Train before V2, without effect",
    "TrainingFailedError": "raised by fit(); a sweep records the trial as failed",
    "UserCallback": TRAINER_SIDE + "it watches a whole run, so it would watch the lane",
    "ValidationConfig": TRAINER_SIDE + "validation",
    "ValidationFn": "the type of validation.fn",
    "WorkerGroupError": "raised by fit(); a sweep retries the trial (failure.max_retries)",
    "torch.TorchConfig": TRAINER_SIDE + "a lane has torch's process group",
    "torch.TorchTrainer": TRAINER_SIDE + "it is the sweep that runs the train function",
}

# Two runs of two workers each, for every case, and a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def plain(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each case sees in a plain `TorchTrainer` of two workers."""
    folder = tmp_path_factory.mktemp("plain")
    cloudpickle.register_pickle_by_value(contract)
    try:
        for number, case in enumerate(CASES):
            trainer = ray.train.torch.TorchTrainer(
                lambda config: contract.tell(**config),
                train_loop_config={"case": case, "folder": str(folder)},
                scaling_config=ray.train.ScalingConfig(
                    num_workers=2, resources_per_worker={"CPU": 1}
                ),
                run_config=ray.train.RunConfig(
                    name=f"trial-{number}", storage_path=str(folder / "runs")
                ),
                datasets={
                    "train": contract.make_dataset(contract.NUM_ROWS, 1),
                    "whole": contract.make_dataset(contract.NUM_ROWS, 10),
                }
                if case == "shards"
                else None,
                dataset_config=ray.train.DataConfig(
                    datasets_to_split=["train"],
                    execution_options=ray.data.ExecutionOptions(preserve_order=True),
                ),
                validation_config=ray.train.ValidationConfig(
                    contract.validate, ray.train.ValidationTaskConfig(fn_kwargs={"factor": 10})
                )
                if case == "validations"
                else None,
            )
            trainer.fit()
    finally:
        cloudpickle.unregister_pickle_by_value(contract)
    return folder


@pytest.fixture(scope="module")
def lane(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepRecord]:
    """The same from one lane that serves all cases, and the sweep."""
    folder = tmp_path_factory.mktemp("lane")
    data = "hydra.sweeper.data.datasets"
    target = f"_target_:__main__.make_dataset,rows:{contract.NUM_ROWS}"
    record = run_app(
        folder,
        f"case={','.join(CASES)}",
        f"folder={folder}",
        "hydra.sweeper.objective.metric=valid_loss",
        "hydra.sweeper.scheduler=none",
        # The driver drops checkpoints that are neither best nor newest: not during a trial here.
        "hydra.sweeper.lane.flush_interval_s=600",
        "hydra.sweeper.validation.fn=__main__.validate",
        "hydra.sweeper.validation.fn_kwargs={factor:10}",
        f"+{data}={{train:{{{target},step:1}},whole:{{{target},step:10}}}}",
        "hydra.sweeper.data.datasets_to_split=[train]",
    )
    return folder, record


def run_app(folder: Path, *overrides: str) -> SweepRecord:
    """Run a sweep of the app with one lane of two workers, as a program would; give the sweep."""
    common = (
        "hydra/sweeper=heats",
        "hydra.sweeper.study_name=contract",
        "hydra.sweeper.scaling.num_workers=2",
        "hydra.sweeper.cluster.num_cpus=4",  # Of the cluster, not of this machine.
        "hydra.sweeper.lane.max_concurrent=1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(APP), "-m", *common, *overrides])
        try:
            runpy.run_path(str(APP), run_name="__main__")
        except SystemExit as exc:
            assert exc.code in (0, None), exc.code  # noqa: PT017 - it is not what is tested
    return read_sweep(folder / "mlruns" / "sweeps" / "contract")


def told(folder: Path, case: str, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / f"{case}-{rank}.json").read_text())
    return seen


@pytest.mark.parametrize("case", CASES)
def test_train_function_sees_in_a_lane_what_it_sees_in_a_plain_trainer(
    case: str, plain: Path, lane: tuple[Path, SweepRecord]
) -> None:
    folder, record = lane
    trial = record.trials[CASES.index(case)]
    assert trial.error is None or "never reported" in trial.error
    for rank in (0, 1):
        assert told(folder, case, rank) == told(plain, case, rank)


def test_validated_metrics_are_those_of_the_trials_reports(
    lane: tuple[Path, SweepRecord],
) -> None:
    trial = lane[1].trials[CASES.index("validations")]
    assert [report.metrics.get("valid_loss") for report in trial.reports] == [
        10.0,
        200.0,
        None,
        None,
        None,
    ]
    assert (trial.state, trial.value) == (COMPLETE, 10.0), "and the objective is one of them"


def test_ranks_of_a_lane_share_a_dataset_without_overlap(lane: tuple[Path, SweepRecord]) -> None:
    first, second = (told(lane[0], "shards", rank) for rank in (0, 1))
    whole = first["epochs"][0] + second["epochs"][0]
    assert sorted(whole) == list(range(contract.NUM_ROWS))
    assert first["epochs"][2] == first["epochs"][0]
    assert first["whole"] == [10 * row for row in range(contract.NUM_ROWS)]


@pytest.mark.parametrize("materialize", [True, False])
def test_trial_after_one_that_stopped_in_the_middle_of_an_epoch_sees_all_data_as_if_it_were_first(
    materialize: bool, ray_cluster: str, tmp_path: Path
) -> None:
    node = f"_target_:__main__.make_shuffled,rows:{contract.NUM_ROWS}"
    record = run_app(
        tmp_path,
        "case=stops",
        "hydra.sweeper.objective.metric=loss",
        "loss=2,4,3,1",
        "hydra/sweeper/sampler=grid",
        f"+hydra.sweeper.data.datasets={{train:{{{node}}}}}",
        f"hydra.sweeper.data.materialize={materialize}",
        "hydra.sweeper.asha.max_resource=4",
        "hydra.sweeper.asha.reduction_factor=2",
        "hydra.sweeper.lane.verdict_wait_s=5",
    )
    trials = [trial for _, trial in sorted(record.trials.items())]
    assert [trial.state for trial in trials] == [COMPLETE, PRUNED, PRUNED, COMPLETE]
    for rank in (0, 1):
        first, second, third, last = (
            json.loads((tmp_path / "told" / f"rows-{number}-{rank}.json").read_text())
            for number in range(4)
        )
        assert [len(epochs) for epochs in (second, third)] == [1, 1], "stopped in the first epoch"
        for stopped in (second, third):
            assert 0 < len(stopped[0]) < len(first[0])
            assert stopped[0] == first[0][: len(stopped[0])]
        assert last == first
        assert (first[0] == first[1]) == materialize


def test_trials_that_search_over_what_a_dataset_is_made_of_read_their_own(
    ray_cluster: str, tmp_path: Path
) -> None:
    node = "_target_:__main__.make_shuffled,rows:${rows}"
    record = run_app(
        tmp_path,
        "case=stops",
        "hydra.sweeper.objective.metric=loss",
        "rows=8,20",
        "loss=1,2",
        "hydra.sweeper.scheduler=none",
        f"+hydra.sweeper.data.datasets={{train:{{{node}}}}}",
    )
    rows = {number: int(str(each.params["rows"])) for number, each in record.trials.items()}
    assert sorted(rows.values()) == [8, 8, 20, 20]
    for number, num_rows in rows.items():
        read = [
            json.loads((tmp_path / "told" / f"rows-{number}-{rank}.json").read_text())
            for rank in (0, 1)
        ]
        for epoch in (0, 1):
            assert sorted(read[0][epoch] + read[1][epoch]) == list(range(num_rows))


# --- completeness -------------------------------------------------------------------------------


def public_names() -> set[str]:
    modules = {"": ray.train, "torch.": ray.train.torch, "collective.": ray.train.collective}
    return {f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__}


def names_used(source: str) -> set[str]:
    """Every `ray.train.X` and `ray.train.torch.X` in a program, without `ray.train.`."""
    dotted = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if is_name(node)}
    return {name.removeprefix("ray.train.") for name in dotted if name.startswith("ray.train.")}


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute)


def test_every_public_name_of_ray_train_is_covered_or_left_out_for_a_reason() -> None:
    used = names_used(APP.read_text(encoding="utf-8"))
    missing = public_names() - used - set(NOT_IN_A_TRAIN_FUNCTION)
    assert not missing, (
        f"ray {ray.__version__} has new names: {sorted(missing)}. Use each in a case of {APP.name}"
        " and see that a lane gives the same, or say in NOT_IN_A_TRAIN_FUNCTION why not."
    )
    assert not set(NOT_IN_A_TRAIN_FUNCTION) & used
    assert set(NOT_IN_A_TRAIN_FUNCTION) <= public_names()


def test_every_option_of_report_is_covered() -> None:
    source = APP.read_text(encoding="utf-8")
    options = set(inspect.signature(ray.train.report).parameters) - {"metrics"}
    missing = {option for option in options if f"{option}=" not in source}
    assert not missing, f"ray {ray.__version__}: ray.train.report has new options {missing}"
