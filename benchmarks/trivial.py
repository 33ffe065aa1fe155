"""A trial with no training in it: what it costs is what its surroundings cost.

It is a recipe for `sweep.py` and a train function for a plain `TorchTrainer` alike.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ray.train

NUM_REPORTS = 5


def train(config: dict[str, Any]) -> None:
    """Report one metric again and again.

    Args:
        config: `lr` is the loss that is reported, so that a sampler has something to go by;
            `num_reports` how often (5 where it is missing); `out`, where it is given, is a file
            that gets the seconds which each report took, as a JSON list.
    """
    took_s = []
    for _ in range(config.get("num_reports", NUM_REPORTS)):
        began_s = time.perf_counter()
        ray.train.report({"loss": config["lr"]})
        took_s.append(time.perf_counter() - began_s)
    if "out" in config:
        Path(config["out"]).write_text(json.dumps(took_s), encoding="utf-8")
