"""Trials in the driver process, one after another, with no Ray cluster: for a debugger."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from typing import TYPE_CHECKING

from heats.errors import TrialStoppedError
from heats.lane.health import fault_of
from heats.lane.task import run_task
from heats.trial import Ending, Outcome, Verdict

if TYPE_CHECKING:
    from heats.config import ValidationConf
    from heats.lane.task import TaskFunction
    from heats.trial import Coordinator, Report, TrialSpec


logger = logging.getLogger(__name__)


def run_inline(
    coordinator: Coordinator,
    function: TaskFunction,
    *,
    seed: int,
    tracking_uri: str | None = None,
    num_threads: int | None = None,
    validation: ValidationConf | None = None,
) -> None:
    """Run the coordinator's trials here; breakpoints work and output goes to the terminal.

    `tracking_uri` is for user code that logs extras into its trial's run. `num_threads` is torch's,
    None: its own default; OMP_NUM_THREADS goes first, as it does in Ray. `validation` is what a
    lane's trials have as well, None: not.
    """
    import torch

    from heats.lane.context import quiet_ray_train
    from heats.lane.reset import RankState

    quiet_ray_train()
    if num_threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_threads))
    if tracking_uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri
    state = RankState(max_memory_growth_mib=math.inf)
    while not coordinator.is_done():
        spec = coordinator.next_trial()
        if spec is None:
            time.sleep(0.01)
            continue
        outcome = _run(coordinator, spec, function, seed, validation)
        if reasons := "; ".join(state.restore()):
            logger.warning("Trial %d changed what later trials will see: %s.", spec.number, reasons)
        coordinator.end(spec.number, outcome)


def _run(
    coordinator: Coordinator,
    spec: TrialSpec,
    function: TaskFunction,
    seed: int,
    validation: ValidationConf | None,
) -> Outcome:
    from heats.lane.inline_context import inline_context
    from heats.lane.reset import seed_rank

    broken: list[Exception] = []

    def on_report(report: Report) -> Verdict:
        try:
            return coordinator.record(spec.number, [report])
        except Exception as exc:  # noqa: BLE001 - ours, not the trial's: raised once it has ended
            broken.append(exc)
            return Verdict.STOP

    if spec.run_id is not None:
        os.environ["MLFLOW_RUN_ID"] = spec.run_id
    seed_rank(seed + spec.number)
    try:
        with inline_context(spec, on_report, validation=validation):
            returned = run_task(function, spec.config, job_dir=spec.job_dir, is_chief=True)
    except TrialStoppedError:
        if broken:
            raise broken[0] from None
        return Outcome(Ending.STOPPED)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - user code may raise anything; the sweep goes on
        return Outcome.failed(fault_of(exc), traceback.format_exc())
    return Outcome(Ending.RETURNED, returned=returned)
