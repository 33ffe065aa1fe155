"""What a task function may call, in a plain run and in a trial."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ray.train import Checkpoint
from tests.fakes import fake_spec

import heats
from heats.errors import TrialStoppedError
from heats.lane.inline_context import inline_context
from heats.trial import Report, Verdict


def test_report_of_a_plain_run_does_nothing_and_loads_nothing() -> None:
    script = """
        import heats, sys
        heats.report({"loss": 0.5})
        heats.set_tags({"data": "digits"})
        assert heats.get_checkpoint() is None
        print([name for name in sys.modules if name.startswith("ray")])
        import ray.train
        heats.report({"loss": 0.5}, checkpoint=None)
        assert heats.get_checkpoint() is None
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_report_of_a_trial_is_that_of_ray_train(tmp_path: Path) -> None:
    reports: list[Report] = []

    def on_report(report: Report) -> Verdict:
        reports.append(report)
        return Verdict.CONTINUE if len(reports) == 1 else Verdict.STOP

    source = tmp_path / "made"
    source.mkdir()
    (source / "weights").write_text("1")
    spec = fake_spec(artifact_dir=str(tmp_path / "artifacts"))
    with inline_context(spec, on_report):
        assert heats.get_checkpoint() is None
        heats.set_tags({"data": "digits"})
        heats.report({"loss": 0.5, "epoch": 1}, Checkpoint(source), checkpoint_dir_name="first")
        kept = heats.get_checkpoint()
        assert kept is not None
        assert Path(kept.path, "weights").read_text() == "1"
        with pytest.raises(TrialStoppedError):
            heats.report({"loss": 0.4, "epoch": 2})
    assert [report.metrics["loss"] for report in reports] == [0.5, 0.4]
    assert [report.tags for report in reports] == [{"data": "digits"}, {}]
    assert reports[0].checkpoint is not None
    assert reports[0].checkpoint.endswith("first")
