"""`heats doctor --isolation`: it must find what leaks, or finding nothing would mean nothing."""

from __future__ import annotations

import runpy
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

APP = """
    import random

    import hydra
    import torch
    from omegaconf import OmegaConf

    import heats

    SEEN = []  # What no lane can put back: only this file knows of it.


    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        SEEN.append(1)
        for epoch in (1, 2):
            loss = torch.rand(3).sum().item() + random.random() + torch.get_num_threads()
            leak = len(SEEN) if cfg.get("leaks") and epoch == 2 else 0
            heats.report({"loss": loss + leak, "epoch": epoch, "noise": id(object()) + leak})
        return 1.0


    if __name__ == "__main__":
        main()
"""

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("leaks", [False, True])
def test_check_tells_whether_a_used_lane_changes_a_trial(
    leaks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = tmp_path / "app.py"
    app.write_text(textwrap.dedent(APP), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    overrides = ["hydra/sweeper=heats", "hydra.sweeper.check=isolation", f"+leaks={leaks}"]
    monkeypatch.setattr(
        sys, "argv", [str(app), "-m", *overrides, "hydra.sweeper.objective.metric=loss"]
    )
    code: object = 0
    try:
        runpy.run_path(str(app), run_name="__main__")
    except SystemExit as exc:
        code = exc.code
    told = capsys.readouterr().out
    assert "compared over 2 reports: epoch, loss" in told
    assert ("second in a lane: DIFFERS: loss at epoch 2" in told) is leaks
    assert ("second in a lane: identical" in told) is not leaks
    assert ("after a hostile neighbour: identical" in told) is not leaks
    assert code == int(leaks)
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]
