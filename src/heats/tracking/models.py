"""Promotion: a sweep's best checkpoint becomes a version of a registered model, or is refused.

The alias moves last, after everything that can fail. A promotion that was cut off is finished by
the same command: a version of the same run, checkpoint and predictor code is used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException

from heats.errors import ConfigError, PromotionRefusedError, TrackingError
from heats.record import config_file
from heats.tracking import gates
from heats.tracking.candidate import PREDICTOR, Candidate, candidate_of, choose_trial
from heats.tracking.choices import Choices, model_name, promotion_settings
from heats.tracking.gates import Gate
from heats.tracking.ledger import read_sweep
from heats.tracking.predictor import log_model, predictor_source
from heats.tracking.provenance import redact_url
from heats.tracking.registry import (
    PARENT_RUN,
    ROLLED_BACK_AT,
    ROLLED_BACK_TO,
    check_alias,
    connection,
    holder,
    previous_tag,
    tell_sweep,
)
from heats.tracking.runs import Runs
from heats.tracking.usercode import as_in_sweep, load_function, trial_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

    from heats.config import PromotionConf
    from heats.record import SweepRecord, TrialRecord

REPORT = "promotion.json"
FORCED, EVIDENCE = "heats.forced", "heats.evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A finished promotion.

    `is_new` is False where the alias was there already. `forced` names the gates that did not pass.
    `request` is the body of a request to a server of the model, None where it is not known or long.
    """

    model: str
    version: str
    alias: str
    previous: str | None
    study: str
    trial: int
    run_id: str
    objective: str
    value: float
    checkpoint: str
    tracking_uri: str
    is_new: bool
    forced: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    request: str | None = None


def promote(
    sweep_dir: Path,
    choices: Choices | None = None,
    *,
    on_step: Callable[[str], None] = lambda _: None,
) -> Promotion:
    """Register a trial's best checkpoint and give it the alias, if it passes the gates.

    Args:
        sweep_dir: The sweep's folder, with its ledger.
        choices: What to promote, and as what.
        on_step: Is told what is about to be done.

    Raises:
        ConfigError: A name is wrong, or a setting that promotion needs is missing.
        PromotionRefusedError: There is nothing to promote, or a gate did not pass.
        TrackingError: MLflow refused or did not answer; the same command goes on.
    """
    choices = choices or Choices()
    record = read_sweep(sweep_dir)
    settings = promotion_settings(record, choices)
    model = model_name(record, settings, choices)
    check_alias(choices.alias)
    trial = choose_trial(record, choices.trial)
    config = (choices.config or config_file(sweep_dir, trial.number, trial.job_dir)).absolute()
    if not config.is_file():
        msg = (
            f"The config of trial {trial.number} is not at {config}. Give it with "
            "--config FILE: the config.yaml in the .hydra folder of the trial."
        )
        raise ConfigError(msg)
    runs = Runs(record.start, root=sweep_dir.absolute().parents[1])
    with (
        connection(runs.uri) as client,
        as_in_sweep(record.start),
        tempfile.TemporaryDirectory(prefix="heats-promote-") as scratch,
    ):
        run = _run(client, runs, record, trial)
        return _Promoter(
            client=client,
            uri=runs.uri,
            model=model,
            choices=choices,
            settings=settings,
            candidate=candidate_of(record, trial, run.info.run_id),
            run=run,
            config_file=config,
            scratch=Path(scratch),
            on_step=on_step,
        ).promote()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promoter:
    client: MlflowClient
    uri: str
    model: str
    choices: Choices
    settings: PromotionConf
    candidate: Candidate
    run: Run
    config_file: Path
    scratch: Path
    on_step: Callable[[str], None]
    found: list[Gate] = field(default_factory=list)

    def promote(self) -> Promotion:
        source = predictor_source(self.settings.predictor or "")
        digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
        champion = holder(self.client, self.model, self.choices.alias)
        if champion and self._is_same(champion, digest):
            tell_sweep(self.client, champion)
            return self._promotion(champion, previous=None, is_new=False)

        self.on_step("Evaluating the checkpoint anew")
        evaluate = load_function("promotion.evaluate", self.settings.evaluate or "")
        config = trial_config(self.config_file)
        checkpoint = self._local_checkpoint()
        tolerance = self.settings.tolerance
        self.found.append(
            gates.reproduced(self.candidate, evaluate, config, checkpoint, tolerance=tolerance)
        )
        self.found.append(gates.better(self.candidate, champion, self.choices.alias))
        forced = tuple(gate.name for gate in self.found if not gate.passed)
        if forced and not self.choices.is_forced:
            raise self._refusal()

        version = self._find_version(digest)
        if version is None:
            self.on_step("Building the model")
            model_id = log_model(
                self.client,
                self.run,
                source,
                checkpoint,
                example=self._example(config),
                step=self.candidate.resource,
            )
            try:
                request = self._check_answers(f"models:/{model_id}")
            except PromotionRefusedError:
                with contextlib.suppress(MlflowException):
                    self.client.delete_logged_model(model_id)
                raise
            version = self._register(model_id, digest)
        else:
            request = self._check_answers(f"models:/{self.model}/{version.version}")
        previous = champion.version if champion else None
        self._describe(version, digest, previous=previous, forced=forced)
        self._move_alias(version, expected=champion)
        tell_sweep(self.client, version)
        return self._promotion(
            version, previous=previous, is_new=True, forced=forced, request=request
        )

    def _is_same(self, version: ModelVersion, digest: str) -> bool:
        return gates.is_from(version, self.candidate) and (version.tags.get(PREDICTOR) == digest)

    def _find_version(self, digest: str) -> ModelVersion | None:
        """A version of the same checkpoint and code, left by an earlier promotion."""
        query = f"name = '{self.model}' and run_id = '{self.candidate.run_id}'"
        for version in self.client.search_model_versions(query):
            if version.status == "READY" and self._is_same(version, digest):
                return version
        return None

    def _refusal(self) -> PromotionRefusedError:
        failed = "; ".join(f"{gate.name}: {gate.detail}" for gate in self.found if not gate.passed)
        can_force = not any(gate.name == "answers" for gate in self.found)
        remedy = " Promote it all the same with --force, which is recorded." if can_force else ""
        return PromotionRefusedError(
            f"Trial {self.candidate.trial} of {self.candidate.study} is not promoted to "
            f"{self.model}@{self.choices.alias}: {failed}.{remedy}"
        )

    def _local_checkpoint(self) -> Path:
        uri = self.candidate.checkpoint
        folder = self.scratch / "checkpoint"
        if "://" not in uri:
            # MLflow takes a path with one of these for a URI, and finds nothing.
            is_plain = not {"#", "%", "?"} & set(uri)
            return Path(uri) if is_plain else Path(shutil.copytree(uri, folder))
        from pyarrow import fs

        self.on_step("Fetching the checkpoint")
        try:
            fs.copy_files(uri, str(folder))
        except OSError as exc:
            msg = f"The checkpoint {redact_url(uri)} cannot be read: {exc}"
            raise PromotionRefusedError(msg) from exc
        return folder

    def _check_answers(self, model_uri: str) -> str | None:
        self.on_step("Asking the model in a fresh process")
        folder = self.scratch / "answers"
        folder.mkdir()
        gate, request = gates.answers(model_uri, self.uri, folder)
        self.found.append(gate)
        if not gate.passed:
            raise self._refusal()
        return request

    def _example(self, config: dict[str, Any]) -> Any:
        path = self.settings.example
        if path is None:
            return None
        try:
            return load_function("promotion.example", path)(config)
        except ConfigError:
            raise
        except Exception as exc:
            msg = f"promotion.example={path!r} raised {type(exc).__name__}: {exc}"
            raise ConfigError(msg) from exc

    def _register(self, model_id: str, digest: str) -> ModelVersion:
        self.on_step("Registering the version")
        try:
            self.client.create_registered_model(self.model)
        except MlflowException as exc:
            if exc.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self.client.create_model_version(
            self.model,
            source=f"models:/{model_id}",
            run_id=self.run.info.run_id,
            model_id=model_id,
            tags={**self.candidate.tags(), PREDICTOR: digest},
        )

    def _describe(
        self,
        version: ModelVersion,
        digest: str,
        *,
        previous: str | None,
        forced: tuple[str, ...],
    ) -> None:
        """Write down where the version comes from, what it replaces, and what the gates found."""
        found = [dataclasses.asdict(gate) for gate in self.found]
        tags = {
            **self.candidate.tags(),
            PREDICTOR: digest,
            FORCED: "true" if forced else "false",
            EVIDENCE: json.dumps(found),
        }
        stale = {ROLLED_BACK_AT, ROLLED_BACK_TO}
        if previous is None:
            stale.add(previous_tag(self.choices.alias))
        else:
            tags[previous_tag(self.choices.alias)] = str(previous)
        for key, value in tags.items():
            self.client.set_model_version_tag(self.model, version.version, key, value)
        for key in stale & set(version.tags):
            self.client.delete_model_version_tag(self.model, version.version, key)
        self.client.update_model_version(
            self.model, version.version, _description(self.candidate, self.run)
        )
        report = {
            "model": self.model,
            "version": str(version.version),
            "alias": self.choices.alias,
            "previous": previous,
            "forced": list(forced),
            "gates": found,
            **self.candidate.tags(),
        }
        self.client.log_dict(self.run.info.run_id, report, REPORT)

    def _move_alias(self, version: ModelVersion, *, expected: ModelVersion | None) -> None:
        alias = self.choices.alias
        present = holder(self.client, self.model, alias)
        if (present and present.version) != (expected and expected.version):
            msg = (
                f"{self.model}@{alias} became version {present.version if present else 'none'} "
                f"while trial {self.candidate.trial} was checked. Promote again to compare with it."
            )
            raise PromotionRefusedError(msg)
        self.client.set_registered_model_alias(self.model, alias, str(version.version))

    def _promotion(
        self,
        version: ModelVersion,
        *,
        previous: str | None,
        is_new: bool,
        forced: tuple[str, ...] = (),
        request: str | None = None,
    ) -> Promotion:
        candidate = self.candidate
        return Promotion(
            model=self.model,
            version=str(version.version),
            alias=self.choices.alias,
            previous=None if previous is None else str(previous),
            study=candidate.study,
            trial=candidate.trial,
            run_id=candidate.run_id,
            objective=candidate.objective.name,
            value=candidate.value,
            checkpoint=candidate.checkpoint,
            tracking_uri=self.uri,
            is_new=is_new,
            forced=forced,
            gates=tuple(self.found),
            request=request,
        )


def _run(client: MlflowClient, runs: Runs, record: SweepRecord, trial: TrialRecord) -> Run:
    study, run_id = record.start.study_name, trial.run_id
    if run_id is None and (created := runs.find_trial_run(trial.number)):
        run_id = created.run_id
    try:
        run = None if run_id is None else client.get_run(run_id)
    except MlflowException as exc:
        if exc.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        run = None
    if run is None:
        msg = (
            f"MLflow at {runs.shown_uri} has no run of trial {trial.number} of {study}. Send it "
            f"with `heats sync {study}`, then promote again."
        )
        raise TrackingError(msg)
    if run.info.lifecycle_stage != "active":
        msg = (
            f"The run {run_id} of trial {trial.number} was deleted in MLflow. Restore it with "
            f"`mlflow runs restore --run-id {run_id}`, then promote again."
        )
        raise TrackingError(msg)
    return run


def _description(candidate: Candidate, run: Run) -> str:
    """Markdown, with links that work wherever the registry's own page is shown."""
    runs = f"#/experiments/{run.info.experiment_id}/runs"
    links = [f"[run of the trial]({runs}/{run.info.run_id})"]
    if parent := run.data.tags.get(PARENT_RUN):
        links.append(f"[run of the sweep]({runs}/{parent})")
    objective = candidate.objective
    return (
        f"Trial {candidate.trial} of the sweep `{candidate.study}`: {objective.name} "
        f"{candidate.value:.6g} ({objective.direction.value}) at {objective.resource} "
        f"{candidate.resource}. {', '.join(links)}."
    )
