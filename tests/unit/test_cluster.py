from __future__ import annotations

import os

import pytest

from heats.cluster import Node, capacity, fits, lane_shape, local_node, without
from heats.config import BackendConf, ClusterConf, Placement, ScalingConf
from heats.errors import ConfigError
from heats.trial import LaneShape

CPUS = [Node({"CPU": 8.0})]
GPUS = [Node({"CPU": 8.0, "GPU": 4.0}), Node({"CPU": 16.0, "GPU": 2.0})]
TWO_OF_4 = [Node({"CPU": 4.0}), Node({"CPU": 4.0})]
A100S = [Node({"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0})]
MIXED = [Node({"CPU": 8.0}), Node({"CPU": 4.0, "GPU": 1.0})]


@pytest.mark.parametrize(
    ("nodes", "is_single_run", "conf", "shape"),
    [
        (CPUS, False, ScalingConf(), LaneShape(1, False, {"CPU": 1.0})),
        (CPUS, True, ScalingConf(), LaneShape(1, False, {"CPU": 8.0})),
        (CPUS, True, ScalingConf(num_workers=2), LaneShape(2, False, {"CPU": 1.0})),
        (GPUS, False, ScalingConf(), LaneShape(1, True, {"GPU": 1.0})),
        (GPUS, False, ScalingConf(num_workers=4), LaneShape(4, True, {"GPU": 1.0})),
        (GPUS, True, ScalingConf(), LaneShape(6, True, {"GPU": 1.0})),
        (GPUS, True, ScalingConf(use_gpu=False), LaneShape(1, False, {"CPU": 16.0})),
        (MIXED, True, ScalingConf(), LaneShape(1, True, {"GPU": 1.0})),
        (
            GPUS,
            False,
            ScalingConf(resources_per_worker={"GPU": 0.5, "CPU": 2.0}),
            LaneShape(1, True, {"GPU": 0.5, "CPU": 2.0}),
        ),
        (
            A100S,
            False,
            ScalingConf(accelerator_type="A100", placement_strategy=Placement.SPREAD),
            LaneShape(
                1, True, {"GPU": 1.0, "accelerator_type:A100": 0.001}, placement=Placement.SPREAD
            ),
        ),
    ],
)
def test_shape_of_a_trial_follows_what_the_cluster_has(
    nodes: list[Node], is_single_run: bool, conf: ScalingConf, shape: LaneShape
) -> None:
    assert lane_shape(conf, BackendConf(), nodes, is_single_run=is_single_run) == shape


@pytest.mark.parametrize(
    ("now", "num_workers"),
    [(None, 6), (TWO_OF_4, 8), ([*CPUS, *CPUS], 8), (TWO_OF_4[:1], 4), ([], 2)],
)
def test_elastic_workers_are_as_many_as_fit_on_what_is_there_now(
    now: list[Node] | None, num_workers: int
) -> None:
    conf = ScalingConf(num_workers=[2, 8], resources_per_worker={"CPU": 1.0})
    start = [Node({"CPU": 6.0})]
    shape = lane_shape(conf, BackendConf(), start, is_single_run=False, now=now)
    assert shape.num_workers == num_workers


@pytest.mark.parametrize(
    ("nodes", "conf", "told"),
    [
        (CPUS, ScalingConf(num_workers=9), ["num_workers=9", "has 8 CPU", "Ask for fewer"]),
        (CPUS, ScalingConf(num_workers=[9, 12]), ["num_workers=9", "has 8 CPU"]),
        (CPUS, ScalingConf(use_gpu=True), ["has 0 GPU", "scaling.use_gpu=false"]),
        (CPUS, ScalingConf(resources_per_worker={"TPU": 1.0}), ["1 TPU each", "has 0 TPU"]),
        (A100S, ScalingConf(accelerator_type="H100"), ["has 4 GPU, 0 accelerator_type:H100"]),
        # Six workers of 4 CPUs are 24, as many as there are, but one would span two nodes.
        (
            [Node({"CPU": 14.0}), Node({"CPU": 10.0})],
            ScalingConf(num_workers=6, resources_per_worker={"CPU": 4.0}),
            ["has 24 CPU"],
        ),
    ],
)
def test_trial_that_does_not_fit_is_refused_with_what_there_is(
    nodes: list[Node], conf: ScalingConf, told: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        lane_shape(conf, BackendConf(), nodes, is_single_run=False)
    for part in told:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "nodes", "num_trials"),
    [
        (LaneShape(1, False, {"CPU": 1.0}), CPUS, 8),
        (LaneShape(3, False, {"CPU": 1.0}), CPUS, 2),
        (LaneShape(1, False, {"CPU": 3.0}), CPUS, 2),
        (LaneShape(1, True, {"GPU": 1.0}), GPUS, 6),
        (LaneShape(1, True, {"GPU": 1.0, "CPU": 4.0}), GPUS, 4),
        (LaneShape(1, True, {"GPU": 0.1}), MIXED, 10),
        (LaneShape(1, False, {"CPU": 0.1}), [Node({"CPU": 0.3})], 3),
        (LaneShape(2, True, {"GPU": 1.0}), MIXED, 0),
        (LaneShape(1, False, {"CPU": 1.0, "GPU": 0.0}), CPUS, 8),
        (LaneShape(1, False, {"CPU": 1.0}), [], 0),
        (LaneShape(6, False, {"CPU": 1.0}, placement=Placement.SPREAD), TWO_OF_4, 1),
        (LaneShape(6, False, {"CPU": 1.0}, placement=Placement.STRICT_PACK), TWO_OF_4, 0),
        (LaneShape(3, False, {"CPU": 1.0}, placement=Placement.STRICT_PACK), TWO_OF_4, 2),
        (LaneShape(3, False, {"CPU": 1.0}, placement=Placement.STRICT_SPREAD), TWO_OF_4, 0),
        (LaneShape(2, False, {"CPU": 1.0}, placement=Placement.STRICT_SPREAD), TWO_OF_4, 4),
        (LaneShape(1, False, {"CPU": 1.0}, placement=Placement.STRICT_SPREAD), TWO_OF_4, 8),
        (
            LaneShape(2, False, {"CPU": 1.0}, placement=Placement.STRICT_SPREAD),
            [*TWO_OF_4, *TWO_OF_4],
            8,
        ),
    ],
)
def test_capacity_counts_trials_whose_workers_fit_on_a_node(
    shape: LaneShape, nodes: list[Node], num_trials: int
) -> None:
    assert capacity(shape, nodes) == num_trials


def test_local_node_is_what_is_configured() -> None:
    assert local_node(ClusterConf(num_cpus=3, num_gpus=0)) == Node({"CPU": 3.0})
    assert local_node(ClusterConf(num_cpus=3, num_gpus=2)) == Node({"CPU": 3.0, "GPU": 2.0})


@pytest.mark.parametrize(
    ("visible", "num_gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("GPU-a, GPU-b", 2)]
)
def test_local_node_has_the_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    node = local_node(ClusterConf())
    assert node.resources.get("GPU", 0) == num_gpus
    assert node.resources["CPU"] == len(os.sched_getaffinity(0))


GPU_1, GPU_HALF, GPU_2 = (
    LaneShape(1, True, {"GPU": 1.0}),
    LaneShape(1, True, {"GPU": 0.5}),
    LaneShape(2, True, {"GPU": 1.0}),
)


@pytest.mark.parametrize(
    ("shapes", "gpus", "fit"),
    [
        ([GPU_HALF] * 4, [2], True),
        ([GPU_HALF] * 5, [2], False),
        ([GPU_HALF, GPU_HALF, GPU_1], [2], True),
        ([GPU_HALF, GPU_1, GPU_HALF], [2], True),
        ([GPU_HALF, GPU_HALF, GPU_HALF, GPU_1], [2], False),
        ([GPU_2, GPU_HALF], [2], False),
        ([GPU_2, GPU_HALF], [1, 2], True),
        ([LaneShape(1, True, {"GPU": 0.6})] * 3, [2], False),  # Only one fits on a device.
        ([LaneShape(1, True, {"GPU": 2.0})], [1, 1], False),  # A worker never spans nodes.
        ([LaneShape(1, True, {"GPU": 2.0}), GPU_1], [2, 1], True),
        ([], [], True),
    ],
)
def test_lanes_of_several_shapes_share_devices(
    shapes: list[LaneShape], gpus: list[int], fit: bool
) -> None:
    assert fits(shapes, [Node({"CPU": 8.0, "GPU": float(count)}) for count in gpus]) is fit


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ({}, [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}]),
        ({"CPU": 1.0}, [{"CPU": 4.0}, {"CPU": 7.0, "GPU": 1.0}]),
        ({"CPU": 2.0, "GPU": 1.0}, [{"CPU": 4.0}, {"CPU": 6.0, "GPU": 0.0}]),
        ({"CPU": 9.0}, [{"CPU": 4.0}, {"CPU": 0.0, "GPU": 1.0}]),
    ],
)
def test_what_others_need_is_taken_from_the_largest_node(
    kept: dict[str, float], left: list[dict[str, float]]
) -> None:
    nodes = [Node({"CPU": 4.0}), Node({"CPU": 8.0, "GPU": 1.0})]
    assert [node.resources for node in without(nodes, kept)] == left
