"""Promotion: a sweep's best checkpoint becomes a version of a registered model, or is refused.

Everything that can fail comes before the alias moves, and a promotion that was cut off is finished
by the same command: a version of the same run, checkpoint and predictor is used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException, RestException

from heats.config import PromotionConf, unknown_name
from heats.errors import ConfigError, PromotionRefusedError, TrackingError
from heats.tracking.gates import (
    CHECKPOINT,
    OBJECTIVE,
    PREDICTOR,
    RUN_ID,
    TRIAL,
    VALUE,
    Candidate,
    Gate,
    answers,
    as_in_sweep,
    better,
    is_from,
    load_function,
    reproduced,
)
from heats.tracking.ledger import read_sweep
from heats.tracking.predictor import predictor_source, requirements
from heats.tracking.provenance import redact_url
from heats.trial import TrialState
from heats.wording import STATE_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

    from heats.record import SweepRecord, TrialRecord
