"""Promotion of real digits checkpoints with a real MLflow store, without Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from heats.cli import app
from heats.config import Direction
from heats.errors import ConfigError, PromotionRefusedError, TrackingError
from heats.recipes import digits
from heats.tracking.choices import Choices
from heats.tracking.ledger import Ledger
from heats.tracking.models import promote
from heats.tracking.registry import rollback
from heats.trial import (
    Objective,
    Reported,
    RunCreated,
    SweepEnded,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnStarted,
)

CONFIG: dict[str, Any] = {"hidden": 16, "dropout": 0.0, "lr": 0.01, "weight_decay": 0.0, "seed": 0}
CONFIG_YAML = "lr: 0.01\nrecipe:\n  config: {hidden: 16, dropout: 0.0, lr: '${lr}'}\n"
SETTINGS = {
    "promotion": {
        "evaluate": "heats.recipes.digits.evaluate",
        "predictor": "heats.recipes.digits_predictor",
        "example": "heats.recipes.digits.example",
        "model": None,
        "tolerance": 1e-6,
    }
}
SWEEP_START_S = 1_760_000_000.0
WORSE, BETTER, PRUNED, BARE = range(4)

NewSweep = Callable[..., Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking root whose name MLflow would take for a URI."""
    return tmp_path_factory.mktemp("my #root")


@pytest.fixture(scope="module")
def client(root: Path) -> MlflowClient:
    return MlflowClient(_uri(root), registry_uri=_uri(root))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint of a network after few steps, and one after more."""
    data = digits.load_data()
    torch.manual_seed(0)
    network = digits.network(CONFIG["hidden"], CONFIG["dropout"])
    optimizer = torch.optim.AdamW(network.parameters(), lr=CONFIG["lr"])
    folders = {}
    for number, num_steps in ((WORSE, 10), (BETTER, 30)):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(data.train_images), data.train_labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        folders[number] = tmp_path_factory.mktemp("trained")
        digits.save_checkpoint(str(folders[number]), network, optimizer, num_steps, CONFIG)
    return folders


@pytest.fixture
def new_sweep(root: Path, client: MlflowClient, checkpoints: dict[int, Path]) -> NewSweep:
    """Writes a finished sweep of four trials: worse, better, pruned, and without a checkpoint."""

    def write(name: str, *, val_loss_off_by: float = 0.0, predictor: str | None = None) -> Path:
        promotion = SETTINGS["promotion"] | ({"predictor": predictor} if predictor else {})
        sweep_dir = root / "sweeps" / name
        start = SweepStarted(
            time_s=SWEEP_START_S,
            study_name=name,
            argv=("sweep.py",),
            cwd=str(root),
            script="sweep.py",
            module=None,
            objective=Objective("val_loss", Direction.minimize),
            space={},
            fixed=(),
            settings={"promotion": promotion},
            config_yaml="",
            experiment=name,
            tracking_uri=_uri(root),
        )
        experiment = client.create_experiment(name, (root / "artifacts" / name).as_uri())
        parent = client.create_run(experiment)
        with Ledger.create(sweep_dir, start) as ledger:
            for number in (WORSE, BETTER, PRUNED, BARE):
                tags = {"mlflow.parentRunId": parent.info.run_id}
                run = client.create_run(experiment, tags=tags)
                trained = checkpoints[WORSE if number != BETTER else BETTER]
                artifact_dir = root / "artifacts" / name / run.info.run_id / "artifacts"
                checkpoint = artifact_dir / "checkpoints" / "checkpoint_1"
                shutil.copytree(trained, checkpoint)
                hydra_dir = sweep_dir / str(number) / ".hydra"
                hydra_dir.mkdir(parents=True)
                (hydra_dir / "config.yaml").write_text(CONFIG_YAML)
                metrics = digits.evaluate(CONFIG, str(trained))
                metrics["val_loss"] += val_loss_off_by
                client.log_metric(run.info.run_id, "val_loss", metrics["val_loss"], step=1)
                client.set_terminated(run.info.run_id)
                time_s = SWEEP_START_S + number
                common: dict[str, Any] = {"time_s": time_s, "trial": number}
                ledger.append(TrialAsked(**common, params={}, overrides=()))
                ledger.append(
                    RunCreated(**common, run_id=run.info.run_id, artifact_dir=str(artifact_dir))
                )
                ledger.append(TurnStarted(**common, attempt=0))
                ledger.append(
                    Reported(
                        **common,
                        index=1,
                        resource=1,
                        metrics=metrics,
                        checkpoint=None if number == BARE else str(checkpoint),
                    )
                )
                state = TrialState.PRUNED if number == PRUNED else TrialState.COMPLETE
                value = metrics["val_loss"] + (10 if number == BARE else 0)
                ledger.append(TrialEnded(**common, state=state, value=value))
            ledger.append(SweepEnded(time_s=SWEEP_START_S + 9, reason="done", finished=True))
        return sweep_dir

    return write


def test_promoted_model_predicts_where_heats_was_never_imported(
    root: Path, client: MlflowClient, new_sweep: NewSweep
) -> None:
    sweep_dir = new_sweep("plain")
    experiment = client.get_experiment_by_name("plain")
    assert experiment is not None
    before = _run_states(client, experiment.experiment_id)
    steps: list[str] = []

    promotion = promote(sweep_dir, on_step=steps.append)

    assert promotion.trial == BETTER
    assert (promotion.model, promotion.version, promotion.previous) == ("plain", "1", None)
    assert [(gate.name, gate.passed) for gate in promotion.gates] == [
        ("reproduced", True),
        ("better", True),
        ("answers", True),
    ]
    assert len(steps) >= 3
    assert _run_states(client, experiment.experiment_id) == before

    version = client.get_model_version_by_alias("plain", "champion")
    assert version.tags["heats.run_id"] == version.run_id == promotion.run_id
    assert float(version.tags["heats.value"]) == promotion.value
    assert version.tags["heats.forced"] == "false"
    assert len(json.loads(version.tags["heats.evidence"])) == 3
    assert "#/experiments/" in (version.description or "")
    assert [file.path for file in client.list_artifacts(promotion.run_id)].count("promotion.json")
    parent_id = client.get_run(promotion.run_id).data.tags["mlflow.parentRunId"]
    assert client.get_run(parent_id).data.tags["heats.promoted_version"] == "models:/plain/1"

    asked = _ask_model(root, "models:/plain@champion")
    assert asked == {"modules": [], "answer": [7, 6, 3, 7, 7]}
    assert promotion.request is not None
    assert json.loads(promotion.request).keys() == {"inputs"}

    again = promote(sweep_dir)
    assert (again.version, again.is_new) == ("1", False)
    assert len(client.search_model_versions("name = 'plain'")) == 1


def test_worse_trial_is_refused_then_forced_then_rolled_back(
    root: Path, client: MlflowClient, new_sweep: NewSweep
) -> None:
    sweep_dir = new_sweep("forced")
    champion = promote(sweep_dir)
    with pytest.raises(PromotionRefusedError, match="not lower") as refused:
        promote(sweep_dir, Choices(trial=WORSE))
    assert repr(champion.value) in str(refused.value)
    assert len(client.search_model_versions("name = 'forced'")) == 1

    forced = promote(sweep_dir, Choices(trial=WORSE, is_forced=True))
    assert (forced.version, forced.previous, forced.forced) == ("2", "1", ("better",))
    assert repr(forced.value) in str(refused.value)
    tags = client.get_model_version_by_alias("forced", "champion").tags
    assert tags["heats.forced"] == "true"
    assert tags["heats.previous_champion"] == "1"
    failed = [gate["name"] for gate in json.loads(tags["heats.evidence"]) if not gate["passed"]]
    assert failed == ["better"]

    back = rollback("forced", tracking_uri=_uri(root))
    assert (back.removed, back.restored) == ("2", "1")
    assert str(client.get_model_version_by_alias("forced", "champion").version) == "1"
    assert "heats.rolled_back_at" in client.get_model_version("forced", "2").tags
    with pytest.raises(PromotionRefusedError, match="none to go back to"):
        rollback("forced", tracking_uri=_uri(root))


def test_rollback_names_the_models_and_aliases_there_are(root: Path, client: MlflowClient) -> None:
    client.create_registered_model("named")
    with pytest.raises(ConfigError, match="Did you mean 'named'"):
        rollback("nmed", tracking_uri=_uri(root))
    with pytest.raises(ConfigError, match="alias of named"):
        rollback("named", tracking_uri=_uri(root))


def test_changed_weights_are_refused_with_both_values(new_sweep: NewSweep) -> None:
    sweep_dir = new_sweep("tampered")
    for weights in sweep_dir.parents[1].glob("artifacts/tampered/**/model.safetensors"):
        tensors = load_file(weights)
        tensors["6.bias"].view(torch.int32)[0] ^= 1 << 29  # A bit of the exponent.
        save_file(tensors, weights)
    with pytest.raises(PromotionRefusedError, match=r"reproduced: val_loss is .* was logged as"):
        promote(sweep_dir)


def test_unreadable_checkpoint_is_refused_with_what_its_reader_says(new_sweep: NewSweep) -> None:
    sweep_dir = new_sweep("unreadable")
    for weights in sweep_dir.parents[1].glob("artifacts/unreadable/**/model.safetensors"):
        weights.write_bytes(b"\xff" * 100)
    with pytest.raises(PromotionRefusedError, match="SafetensorError"):
        promote(sweep_dir)


def test_edited_metric_is_refused(new_sweep: NewSweep) -> None:
    sweep_dir = new_sweep("edited", val_loss_off_by=-1e-3)
    with pytest.raises(PromotionRefusedError, match=r"not promoted.*reproduced"):
        promote(sweep_dir)


def test_promotion_cut_off_before_the_alias_is_finished_by_the_next(
    client: MlflowClient, new_sweep: NewSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_dir = new_sweep("cutoff")

    def fail(*_arguments: object, **_options: object) -> None:
        raise MlflowException("the server went away")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", fail)
        with pytest.raises(TrackingError, match="the server went away"):
            promote(sweep_dir)
    assert client.get_registered_model("cutoff").aliases == {}

    promotion = promote(sweep_dir)
    assert (promotion.version, promotion.is_new) == ("1", True)
    assert len(client.search_model_versions("name = 'cutoff'")) == 1


def test_predictor_that_fails_where_it_is_served_is_refused(
    root: Path, client: MlflowClient, new_sweep: NewSweep
) -> None:
    # It works here, where the project's folder is importable, and nowhere else.
    (root / "local_helper.py").write_text("ANSWER = 1\n")
    (root / "needy_predictor.py").write_text(
        "import mlflow\n"
        "import local_helper\n"
        "class Predictor(mlflow.pyfunc.PythonModel):\n"
        "    def predict(self, context, model_input: list[float], params=None) -> list[int]:\n"
        "        return [local_helper.ANSWER] * len(model_input)\n"
        "mlflow.models.set_model(Predictor())\n"
    )
    sweep_dir = new_sweep("needy", predictor="needy_predictor")
    with pytest.raises(PromotionRefusedError, match=r"answers: .*local_helper"):
        promote(sweep_dir, Choices(is_forced=True))
    with pytest.raises(MlflowException):
        client.get_registered_model("needy")


@pytest.mark.parametrize(
    ("trial", "message"),
    [(PRUNED, "is pruned"), (BARE, "reported no checkpoint"), (9, "has no trial 9")],
)
def test_trial_with_nothing_to_promote_is_refused(
    root: Path, new_sweep: NewSweep, trial: int, message: str
) -> None:
    name = f"nothing-{trial}"
    new_sweep(name)
    arguments = ["promote", name, "--trial", str(trial), "--root", str(root)]
    result = CliRunner().invoke(app, arguments)
    assert message in result.stderr
    assert result.exit_code == (2 if trial == 9 else 1)


def test_command_prints_json_and_then_says_that_nothing_changes(
    root: Path, new_sweep: NewSweep
) -> None:
    new_sweep("command")
    arguments = ["promote", "command", "--model", "from command", "--root", str(root)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    promotion = json.loads(result.stdout)
    assert (promotion["version"], promotion["alias"]) == ("1", "champion")

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Nothing was changed" in result.stdout
    assert "mlflow models serve -m 'models:/from command@champion'" in result.stdout

    worse = CliRunner().invoke(app, [*arguments, "--trial", str(WORSE), "--json"])
    assert worse.exit_code == 1
    assert json.loads(worse.stdout)["error"] == "PromotionRefusedError"


def _uri(root: Path) -> str:
    return f"sqlite:///{root / 'mlflow.db'}"


def _run_states(client: MlflowClient, experiment_id: str) -> dict[str, tuple[str, int | None]]:
    runs = client.search_runs([experiment_id])
    return {run.info.run_id: (run.info.status, run.info.end_time) for run in runs}


def _ask_model(root: Path, model_uri: str) -> object:
    """What the model answers to its example, and the modules of heats that were loaded for it."""
    script = (
        "import json, sys, mlflow\n"
        f"model = mlflow.pyfunc.load_model({model_uri!r})\n"
        "answer = model.predict(model.input_example).tolist()\n"
        "modules = [name for name in sys.modules if name.split('.')[0] == 'heats']\n"
        "print(json.dumps({'modules': modules, 'answer': answer}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MLFLOW_TRACKING_URI": _uri(root)},
    )
    return json.loads(done.stdout.splitlines()[-1])
