"""The train functions of the tutorial's last sections, each as a trial of one sweep."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.programs import Program
from tests.tutorial import steps, write

from heats.tracking.ledger import read_sweep
from heats.trial import TrialState

APPS = {"ray_app": "val_accuracy", "hf_app": "eval_accuracy", "lightning_app": "val_accuracy"}

# The apps' own `main` does the same with its `train`; one sweep of all starts Ray once.
SWEEP = """
import importlib

import hydra
from omegaconf import OmegaConf


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    importlib.import_module(cfg.app).train(OmegaConf.to_container(cfg, resolve=True))
    return 0.0


if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate") and find_spec("lightning")),
    reason="needs the extra `frameworks`",
)
def test_train_functions_of_the_frameworks_are_trials_as_they_stand(tmp_path: Path) -> None:
    for step in steps():
        write(step.files, tmp_path)
    (tmp_path / "sweep.py").write_text(SWEEP)
    program = Program(tmp_path)
    try:
        code = program.run(
            "sweep.py",
            "-m",
            f"+app={','.join(APPS)}",
            "epochs=2",
            "hydra.sweeper.study_name=apps",
            "hydra.sweeper.objective.metric=null",
            "hydra.sweeper.scheduler=none",
            "hydra.sweeper.lane.max_concurrent=1",
            "hydra.sweeper.tracking.system_metrics=false",
        )
    finally:
        program.kill()
    assert code == 0, program.output
    trials = read_sweep(tmp_path / "mlruns/sweeps/apps").trials.values()
    by_name = {str(trial.params["+app"]): trial for trial in trials}
    assert by_name.keys() == APPS.keys()
    for name, trial in by_name.items():
        assert trial.state is TrialState.COMPLETE, name
        accuracies = [report.metrics[APPS[name]] for report in trial.reports]
        assert len(accuracies) == 2, name
        assert accuracies[-1] > 0.7, name
