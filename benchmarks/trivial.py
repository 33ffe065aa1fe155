"""A trial with no training in it: what it costs is what its surroundings cost.

It is a recipe for `sweep.py` and a train function for a plain `TorchTrainer` alike.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train

NUM_REPORTS = 5


def note_first(config: dict[str, Any]) -> None:
    """Write the time to the file `first` of the config, unless there is none or it was written."""
    if "first" in config:
        with suppress(FileExistsError), Path(config["first"]).open("x", encoding="utf-8") as file:
            file.write(repr(time.time()))


def train(config: dict[str, Any]) -> None:
    """Report one metric again and again.

    Args:
        config: `lr` is the loss that is reported, so that a sampler has something to go by;
            `num_reports` how often (5 where it is missing); `out`, where it is given, is a file
            that gets the seconds which each report took, as a JSON list; `first` one that gets the
            time of the first report of all trials, since the epoch.
    """
    note_first(config)
    took_s = []
    for _ in range(config.get("num_reports", NUM_REPORTS)):
        began_s = time.perf_counter()
        ray.train.report({"loss": config["lr"]})
        took_s.append(time.perf_counter() - began_s)
    if "out" in config:
        Path(config["out"]).write_text(json.dumps(took_s), encoding="utf-8")
