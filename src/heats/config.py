"""The configuration schema: the dataclasses here are the only definition of every setting.

`SweepConf` is what stands under `hydra.sweeper`, in any Hydra app. `AppConf` is the root of the
shipped app (`sweep.py`), whose `conf/config.yaml` points `hydra.sweeper` at its own top-level
sections, so that they can be set (and swept) by their short names.

This module is imported at every start of every Hydra app through the plugin: nothing heavy here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from heats.errors import ConfigError


class Direction(Enum):
    """Whether a smaller or a larger objective is better."""

    minimize = "minimize"
    maximize = "maximize"


class Placement(Enum):
    """Where the workers of a trial are: Ray's strategies for placement groups."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


class ScoreOrder(Enum):
    """Whether a checkpoint is better with a higher or a lower score: Ray's `CheckpointConfig`."""

    max = "max"
    min = "min"


class Scheduler(Enum):
    """What decides at a report whether a trial goes on.

    `asha`: successive halving. `pbt`, `pb2`: population-based training, whose trials go on from
    better ones with other values. `none`: nothing.
    """

    asha = "asha"
    pbt = "pbt"
    pb2 = "pb2"
    none = "none"


class AshaMode(Enum):
    """What becomes of a trial that is not among the best of a rung.

    `stop`: it ends. `promote`: it waits, with its checkpoint, and goes on once it is.
    """

    stop = "stop"
    promote = "promote"


class Isolation(Enum):
    """Where a trial runs.

    `lane`: in a warm worker group that serves trial after trial. `process`: in a `TorchTrainer` run
    of its own. `inline`: in the driver process, one after another, without Ray (for a debugger).
    """

    lane = "lane"
    process = "process"
    inline = "inline"


class Framework(Enum):
    """What joins the workers of a trial: torch's process group, or what Ray has for another."""

    torch = "torch"
    xgboost = "xgboost"
    lightgbm = "lightgbm"


class Check(Enum):
    """What to look into instead of running a sweep: see heats/isolation.py."""

    isolation = "isolation"


def _require(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        msg = f"{key}={value!r:.80} is not valid: {remedy}"
        raise ConfigError(msg)


@dataclass(slots=True, kw_only=True)
class ObjectiveConf:
    """What the study optimizes.

    `metric` is a reported metric, or null for the value that the task function returns. `resource`
    names the reported metric that counts the amount spent (`epoch`, `step`); where a report lacks
    it, reports are counted instead.
    """

    metric: str | None = None
    direction: Direction = Direction.minimize
    resource: str = "epoch"


@dataclass(slots=True, kw_only=True)
class AshaConf:
    """Successive halving, in units of `objective.resource`; `max_resource` null: no upper end."""

    mode: AshaMode = AshaMode.stop
    min_resource: int = 1
    max_resource: int | None = None
    reduction_factor: int = 3

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(self.min_resource >= 1, "asha.min_resource", self.min_resource, "give 1 or more")
        eta = self.reduction_factor
        _require(eta >= 2, "asha.reduction_factor", eta, "give 2 or more")
        _require(
            self.max_resource is None or self.max_resource >= self.min_resource,
            "asha.max_resource",
            self.max_resource,
            f"give asha.min_resource ({self.min_resource}) or more, or null for no upper end",
        )


@dataclass(slots=True, kw_only=True)
class PbtConf:
    """Population-based training, with the names of Ray Tune's `PopulationBasedTraining`.

    All `n_trials` are one population. `perturbation_interval` and `burn_in_period` are in units of
    `objective.resource`. `resample_probability` does not matter to PB2.
    """

    perturbation_interval: int = 4
    burn_in_period: int = 0
    quantile_fraction: float = 0.25
    resample_probability: float = 0.25

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        interval, burn_in = self.perturbation_interval, self.burn_in_period
        _require(interval >= 1, "pbt.perturbation_interval", interval, "give 1 or more")
        _require(burn_in >= 0, "pbt.burn_in_period", burn_in, "give 0 or more")
        share, chance = self.quantile_fraction, self.resample_probability
        _require(0 < share <= 0.5, "pbt.quantile_fraction", share, "give more than 0, up to 0.5")
        _require(0 <= chance <= 1, "pbt.resample_probability", chance, "give 0 to 1")


@dataclass(slots=True, kw_only=True)
class ScalingConf:
    """Workers of one trial.

    `num_workers` null: one; `[min, max]`: elastic, as Ray has it. `use_gpu` null: yes where the
    cluster has GPUs. A run without a search space takes every GPU (one worker each), or all CPUs in
    one worker. `resources_per_worker` is Ray's mapping (`CPU`, `GPU`, custom), null: one GPU, or
    one CPU. `accelerator_type` (`A100`) and `placement_strategy` are Ray's as well.
    """

    num_workers: Any = None  # A number or a pair: OmegaConf knows no such union.
    use_gpu: bool | None = None
    # A mapping without a type: the command line could not set a typed one that is null.
    resources_per_worker: Any = None
    accelerator_type: str | None = None
    placement_strategy: Placement = Placement.PACK

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        key, count = "scaling.num_workers", self.num_workers
        match count:
            case [int() as least, int() as most]:
                is_valid = 1 <= least <= most
            case _:
                is_valid = count is None or (isinstance(count, int) and count >= 1)
        remedy = "give 1 or more, [min, max] for elastic workers, or null for automatic"
        _require(is_valid, key, count, remedy)
        key, resources = "scaling.resources_per_worker", self.resources_per_worker
        is_mapping = resources is None or isinstance(resources, dict)
        _require(is_mapping, key, resources, "give a mapping such as {CPU: 2}, or null")
        for name, amount in (resources or {}).items():
            is_amount = isinstance(amount, int | float) and amount >= 0
            _require(is_amount, f"{key}.{name}", amount, "give a number, 0 or more")


@dataclass(slots=True, kw_only=True)
class BackendConf:
    """How the workers of a trial are joined.

    `backend` and `timeout_s` (seconds that a collective may take) are those of Ray's `TorchConfig`;
    `backend` null: nccl where each worker has a GPU of its own, else gloo.
    """

    framework: Framework = Framework.torch
    backend: str | None = None
    timeout_s: int = 1800

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(self.timeout_s > 0, "backend.timeout_s", self.timeout_s, "give seconds > 0")


@dataclass(slots=True, kw_only=True)
class LaneConf:
    """How lanes behave; durations in seconds.

    `max_concurrent` caps the trials that run at once (null: as many as the cluster holds).
    `max_memory_growth_mib`: how much more memory than after its first trial a worker may hold after
    a later one, on the host and on its GPU, in MiB; beyond it the lane is replaced.
    `report_timeout_s`: how long nothing may move in any worker of a trial while one of them waits
    in a report; `hang_timeout_s`: the same where none does. Slow steps are not affected.
    `verdict_wait_s`: the least time a report may wait for its verdict at a rung (otherwise 2 % of
    the time since the last report). `flush_interval_s`: how often running trials hand their reports
    to the driver between rungs. `stop_grace_s`: how long a stopped trial may go on to its next
    report before its workers are ended.
    """

    isolation: Isolation = Isolation.lane
    max_concurrent: int | None = None
    max_memory_growth_mib: float = 1024.0
    start_timeout_s: float = 120.0
    verdict_wait_s: float = 0.05
    flush_interval_s: float = 1.0
    stop_grace_s: float = 5.0
    report_timeout_s: float = 30.0
    hang_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(
            self.max_concurrent is None or self.max_concurrent >= 1,
            "lane.max_concurrent",
            self.max_concurrent,
            "give 1 or more, or null for as many as fit",
        )
        growth = self.max_memory_growth_mib
        _require(growth > 0, "lane.max_memory_growth_mib", growth, "give MiB > 0")
        timeouts = "start_timeout_s", "stop_grace_s", "report_timeout_s", "hang_timeout_s"
        for key in (*timeouts, "flush_interval_s"):
            _require(getattr(self, key) > 0, f"lane.{key}", getattr(self, key), "give seconds > 0")
        _require(
            self.verdict_wait_s >= 0, "lane.verdict_wait_s", self.verdict_wait_s, "give 0 or more"
        )


@dataclass(slots=True, kw_only=True)
class FailureConf:
    """How often a trial starts again from its last checkpoint.

    `max_failures` (of Ray's `FailureConfig`): after its own code raised. `max_retries`: after its
    workers were lost. Preemption is charged to neither.
    """

    max_failures: int = 0
    max_retries: int = 2

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        for key in ("max_failures", "max_retries"):
            _require(
                getattr(self, key) >= 0, f"failure.{key}", getattr(self, key), "give 0 or more"
            )


@dataclass(slots=True, kw_only=True)
class ValidationConf:
    """What is done with a checkpoint that a trial reports with `validation`: as Ray Train has it.

    `fn` is the dotted path of `fn(checkpoint, **fn_kwargs) -> dict` (metrics), null: none.
    `fn_kwargs` null: none. `timeout_s` null: no limit. `ray_remote_kwargs` are the options of the
    Ray task that it runs in (`num_cpus`, `num_gpus`), null: one CPU.
    """

    fn: str | None = None
    # Mappings without a type: the command line could not set a typed one that is null.
    fn_kwargs: Any = None
    timeout_s: float | None = None
    ray_remote_kwargs: Any = None

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        fn, limit_s = self.fn, self.timeout_s
        _require(fn is None or "." in fn, "validation.fn", fn, "give a dotted path, or null")
        for key in ("fn_kwargs", "ray_remote_kwargs"):
            value = getattr(self, key)
            is_mapping = value is None or isinstance(value, dict)
            _require(is_mapping, f"validation.{key}", value, "give a mapping, or null")
        _require(
            limit_s is None or limit_s > 0,
            "validation.timeout_s",
            limit_s,
            "give seconds > 0, or null for no limit",
        )

    @property
    def resources(self) -> dict[str, float]:
        """What a validation needs while it runs, by Ray's names; nothing where there is none."""
        if self.fn is None:
            return {}
        options = self.ray_remote_kwargs or {}
        own = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0)}
        return {name: float(amount) for name, amount in own.items() if amount}


@dataclass(slots=True, kw_only=True)
class DataConf:
    """Ray Datasets that trials read with `ray.train.get_dataset_shard(name)`.

    `datasets` maps a name to a node whose `_target_` makes a `ray.data.Dataset`, null: none; trials
    whose nodes are the same share it. Those in `datasets_to_split` (`all`, or a list of names) are
    split between the workers of a trial, of the others each worker gets everything. `materialize`:
    each is computed once and stays in memory while the sweep runs; otherwise anew in every epoch.
    """

    datasets: Any = None
    datasets_to_split: Any = "all"
    materialize: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        key, datasets = "data.datasets", self.datasets
        is_mapping = datasets is None or isinstance(datasets, dict)
        _require(is_mapping, key, datasets, "give a mapping from names to nodes, or null")
        for name, node in (datasets or {}).items():
            has_target = isinstance(node, dict) and "_target_" in node
            _require(has_target, f"{key}.{name}", node, "give a node with a _target_")
        key, names = "data.datasets_to_split", self.datasets_to_split
        is_list = isinstance(names, list) and set(names) <= set(datasets or {})
        _require(names == "all" or is_list, key, names, "give `all`, or names of data.datasets")

    @property
    def resources(self) -> dict[str, float]:
        """What the datasets need besides the trials, by Ray's names; nothing where there are none.

        One CPU: its tasks run one after another rather than never.
        """
        return {"CPU": 1.0} if self.datasets else {}


@dataclass(slots=True, kw_only=True)
class CheckpointConf:
    """Which checkpoints are kept: the `num_to_keep` best of each of the `keep_best` best trials.

    `num_to_keep` (null: all), `checkpoint_score_attribute` (a reported metric, null: the objective)
    and `checkpoint_score_order` are those of Ray's `CheckpointConfig`; they hold for a running
    trial as well, which keeps its newest besides. The order of the objective is its direction.
    """

    keep_best: int = 3
    num_to_keep: int | None = 1
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: ScoreOrder = ScoreOrder.max

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(self.keep_best >= 1, "checkpoint.keep_best", self.keep_best, "give 1 or more")
        count = self.num_to_keep
        remedy = "give 1 or more, or null for all"
        _require(count is None or count >= 1, "checkpoint.num_to_keep", count, remedy)


@dataclass(slots=True, kw_only=True)
class TrackingConf:
    """Where sweeps and MLflow live.

    `root` is a folder, relative to the current directory. `uri` null: the SQLite store
    `<root>/mlflow.db`. `experiment` null: the name of the recipe or of the app.
    """

    root: str = "mlruns"
    uri: str | None = None
    experiment: str | None = None
    system_metrics: bool = True
    system_metrics_interval_s: float = 10.0

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(
            self.system_metrics_interval_s > 0,
            "tracking.system_metrics_interval_s",
            self.system_metrics_interval_s,
            "give seconds > 0",
        )


@dataclass(slots=True, kw_only=True)
class StopConf:
    """When a study ends before its last trial; null means never.

    `target` is a value of the objective that is good enough. `max_failures` counts failed trials in
    a row.
    """

    time_limit_s: float | None = None
    target: float | None = None
    max_failures: int | None = 5

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(
            self.time_limit_s is None or self.time_limit_s > 0,
            "stop.time_limit_s",
            self.time_limit_s,
            "give seconds > 0, or null for no limit",
        )
        _require(
            self.max_failures is None or self.max_failures >= 1,
            "stop.max_failures",
            self.max_failures,
            "give 1 or more, or null for no limit",
        )


@dataclass(slots=True, kw_only=True)
class ClusterConf:
    """The Ray cluster: `address` null starts a local one with this machine's resources.

    `dashboard` starts Ray's dashboard with it, which costs seconds of start-up on two cores.
    """

    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    dashboard: bool = False


@dataclass(slots=True, kw_only=True)
class PromotionConf:
    """What `heats promote` needs to know of a model; each is a dotted path, or null.

    `evaluate(config, checkpoint_dir) -> dict[str, float]` gives the metrics of a checkpoint anew.
    `predictor` is a module whose source is stored as the model's code (MLflow models from code).
    `example(config) -> input` gives an input example. `config` is the `recipe.config` of the trial,
    or all of its config where it has no such node.
    `tolerance` is the relative difference allowed between logged and re-evaluated objective.
    """

    evaluate: str | None = None
    predictor: str | None = None
    example: str | None = None
    model: str | None = None
    tolerance: float = 1e-6


@dataclass(slots=True, kw_only=True)
class Sections:
    """What a sweep can be told, wherever it is told: in the shipped app or under `hydra.sweeper`.

    `n_trials` null: every point of a grid, or 20; a run without a search space is one trial.
    """

    study_name: str | None = None
    n_trials: int | None = None
    scheduler: Scheduler = Scheduler.asha
    objective: ObjectiveConf = field(default_factory=ObjectiveConf)
    asha: AshaConf = field(default_factory=AshaConf)
    pbt: PbtConf = field(default_factory=PbtConf)
    scaling: ScalingConf = field(default_factory=ScalingConf)
    backend: BackendConf = field(default_factory=BackendConf)
    lane: LaneConf = field(default_factory=LaneConf)
    failure: FailureConf = field(default_factory=FailureConf)
    validation: ValidationConf = field(default_factory=ValidationConf)
    data: DataConf = field(default_factory=DataConf)
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    tracking: TrackingConf = field(default_factory=TrackingConf)
    stop: StopConf = field(default_factory=StopConf)
    cluster: ClusterConf = field(default_factory=ClusterConf)
    promotion: PromotionConf = field(default_factory=PromotionConf)

    def __post_init__(self) -> None:
        """Raise ConfigError where a bound does not hold."""
        _require(
            self.n_trials is None or self.n_trials >= 1,
            "n_trials",
            self.n_trials,
            "give 1 or more, or null for the default",
        )

    @property
    def kept_free(self) -> dict[str, float]:
        """What trials must leave of the cluster, by Ray's names: for Ray Data and one validation.

        Trials that wait for either would otherwise wait for ever.
        """
        parts = self.data.resources, self.validation.resources
        names = sorted({name for part in parts for name in part})
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


@dataclass(slots=True, kw_only=True)
class SweepConf(Sections):
    """Everything under `hydra.sweeper`.

    `params` maps a key to the text of a sweep override (`lr: tag(log, interval(1e-5, 1e-1))`).
    `sampler` is a node with a `_target_`; null: a grid where every dimension is a choice, otherwise
    TPE. `seed` seeds the sampler. `resume` goes on with the sweep `study_name`. `check` runs no
    sweep, but looks whether trials disturb each other.
    """

    params: dict[str, str] | None = None
    sampler: Any = None
    seed: int = 0
    resume: bool = False
    check: Check | None = None


@dataclass(slots=True, kw_only=True)
class AppConf(Sections):
    """The root of the shipped app: common hyperparameters, the recipe, and the sweep's sections."""

    lr: float = 1e-3
    batch_size: int = 32
    epochs: int = 1
    weight_decay: float = 0.0
    seed: int = 0
    recipe: Any = None
