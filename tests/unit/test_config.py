from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from omegaconf import OmegaConf

from heats.config import (
    AppConf,
    AshaConf,
    CheckpointConf,
    DataConf,
    Direction,
    FailureConf,
    Isolation,
    LaneConf,
    ObjectiveConf,
    ScalingConf,
    StopConf,
    SweepConf,
    TrackingConf,
    ValidationConf,
)
from heats.errors import ConfigError, unknown_name
from heats.settings import sweep_conf, sweeper_node


def settings(**changes: Any) -> SweepConf:
    return sweep_conf(OmegaConf.merge(OmegaConf.create(sweeper_node()), changes))  # type: ignore[arg-type]


def test_defaults_read_back_as_the_schema() -> None:
    assert settings() == SweepConf()


def test_node_is_a_hydra_sweeper_of_plain_values() -> None:
    node = sweeper_node()
    assert node["_target_"] == "hydra_plugins.heats_sweeper.heats_sweeper.HeatsSweeper"
    assert node["_recursive_"] is False
    assert node["objective"]["direction"] == "minimize"


@pytest.mark.parametrize(
    ("conf", "values", "key"),
    [
        (AshaConf, {"min_resource": 0}, "asha.min_resource=0"),
        (AshaConf, {"reduction_factor": 1}, "asha.reduction_factor=1"),
        (AshaConf, {"min_resource": 5, "max_resource": 4}, "asha.max_resource=4"),
        (ScalingConf, {"num_workers": 0}, "scaling.num_workers=0"),
        (ScalingConf, {"num_workers": [3, 2]}, "scaling.num_workers=[3, 2]"),
        (ScalingConf, {"num_workers": "two"}, "scaling.num_workers='two'"),
        (ScalingConf, {"resources_per_worker": {"CPU": -1}}, "scaling.resources_per_worker.CPU=-1"),
        (LaneConf, {"max_concurrent": 0}, "lane.max_concurrent=0"),
        (FailureConf, {"max_retries": -1}, "failure.max_retries=-1"),
        (CheckpointConf, {"num_to_keep": 0}, "checkpoint.num_to_keep=0"),
        (LaneConf, {"start_timeout_s": 0.0}, "lane.start_timeout_s=0.0"),
        (LaneConf, {"flush_interval_s": 0.0}, "lane.flush_interval_s=0.0"),
        (LaneConf, {"stop_grace_s": -1.0}, "lane.stop_grace_s=-1.0"),
        (LaneConf, {"verdict_wait_s": -0.1}, "lane.verdict_wait_s=-0.1"),
        (CheckpointConf, {"keep_best": 0}, "checkpoint.keep_best=0"),
        (ValidationConf, {"fn": "validate"}, "validation.fn='validate'"),
        (ValidationConf, {"fn_kwargs": [1]}, "validation.fn_kwargs=[1]"),
        (ValidationConf, {"timeout_s": 0.0}, "validation.timeout_s=0.0"),
        (DataConf, {"datasets": "train"}, "data.datasets='train'"),
        (DataConf, {"datasets": {"train": {}}}, "data.datasets.train={}"),
        (DataConf, {"datasets_to_split": ["x"]}, "data.datasets_to_split=['x']"),
        (
            TrackingConf,
            {"system_metrics_interval_s": 0.0},
            "tracking.system_metrics_interval_s=0.0",
        ),
        (StopConf, {"time_limit_s": 0.0}, "stop.time_limit_s=0.0"),
        (StopConf, {"max_failures": 0}, "stop.max_failures=0"),
        (SweepConf, {"n_trials": 0}, "n_trials=0"),
    ],
)
def test_bound_that_does_not_hold_is_named_with_what_to_give(
    conf: type[Any], values: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        conf(**values)
    assert str(refused.value).startswith(f"{key} is not valid: give ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sceduler": "asha"}, ["'sceduler'", "Did you mean 'scheduler'?", "n_trials"]),
        ({"n_trials": "many"}, ["n_trials is not valid", "many"]),
        ({"asha": {"min_resource": 0}}, ["asha.min_resource=0 is not valid"]),
        ({"asha": {"min_resouce": 1}}, ["min_resouce"]),
        ({"lane": {"isolation": "thread"}}, ["lane.isolation is not valid", "inline"]),
        ({"objective": {"direction": "up"}}, ["objective.direction is not valid", "maximize"]),
    ],
)
def test_wrong_setting_is_refused_by_name(changes: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**changes)
    for part in told:
        assert part in str(refused.value)


def test_interpolations_are_resolved_and_enums_read() -> None:
    config = OmegaConf.create(
        {
            "objective": {"metric": "val_loss", "direction": "maximize"},
            "sweeper": {**sweeper_node(), "objective": "${objective}"},
        }
    )
    config.sweeper.lane.isolation = "inline"
    conf = sweep_conf(config.sweeper)
    assert conf.objective == ObjectiveConf(metric="val_loss", direction=Direction.maximize)
    assert conf.lane.isolation is Isolation.inline


def test_every_section_of_the_app_is_one_of_the_sweeper() -> None:
    known = {field.name for field in dataclasses.fields(SweepConf)}
    own = {"lr", "batch_size", "epochs", "weight_decay", "seed", "recipe"}
    assert {field.name for field in dataclasses.fields(AppConf)} - own <= known


@pytest.mark.parametrize(
    ("name", "known", "told"),
    [
        ("momentm", ["lr", "momentum"], "Did you mean 'momentum'? Known: momentum, lr."),
        ("zzz", ["lr", "batch"], "'zzz'. Known: batch, lr."),
        ("lr", [], "Known: none."),
    ],
)
def test_unknown_name_lists_the_known_ones_nearest_first(
    name: str, known: list[str], told: str
) -> None:
    assert str(unknown_name("key", name, known)).endswith(told)


def test_trials_leave_room_for_datasets_and_one_validation() -> None:
    assert settings().kept_free == {}
    node = {"_target_": "app.make"}
    assert settings(data={"datasets": {"train": node}}).kept_free == {"CPU": 1.0}
    validation = {"fn": "app.validate", "ray_remote_kwargs": {"num_gpus": 1}}
    both = settings(data={"datasets": {"train": node}}, validation=validation)
    assert both.kept_free == {"CPU": 2.0, "GPU": 1.0}
