"""The scheduler that a sweep's settings ask for, with what the ledger knows taken up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heats.asha import Asha
from heats.config import Scheduler

if TYPE_CHECKING:
    from heats.config import AshaConf, PbtConf, SweepConf
    from heats.record import SweepRecord
    from heats.space import SearchSpace
    from heats.trial import TrialScheduler


def pace(conf: SweepConf) -> AshaConf | PbtConf | None:
    """The settings that say at which amounts there is something to decide; None: nowhere."""
    if conf.scheduler is Scheduler.asha:
        return conf.asha
    return None if conf.scheduler is Scheduler.none else conf.pbt


def make_scheduler(
    conf: SweepConf, space: SearchSpace, record: SweepRecord, num_trials: int
) -> TrialScheduler | None:
    """The scheduler of a sweep of so many trials; None where nothing is decided.

    Raises:
        ConfigError: The search space does not fit the scheduler.
    """
    match conf.scheduler:
        case Scheduler.none:
            return None
        case Scheduler.asha:
            asha = Asha(conf.asha, record.objective)
            judged = [each for trial in record.trials.values() for each in trial.judged]
            paused = [number for number, trial in record.trials.items() if trial.is_paused]
            asha.restore(sorted(judged, key=lambda each: each.time_s), paused)
            return asha
    from heats.tune.population import Population

    population = Population(conf, space, record, num_trials)
    population.restore()
    return population
