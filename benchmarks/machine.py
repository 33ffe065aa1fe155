"""Facts of the machine that a timing depends on, and how much of it others use."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parent.parent
_PACKAGES = ("ray", "torch", "optuna", "mlflow", "hydra-core")


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def facts() -> dict[str, Any]:
    """CPU, memory, system and versions, without names or paths of this very machine."""
    return {
        "cpu": _cpu_model(),
        "cpus": num_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "heats": {"version": version("heats"), "commit": _commit()},
    }


def others_cpu_share() -> float:
    """Share of all CPUs in use during one second in which this process only waits, from 0 to 1."""
    return float(psutil.cpu_percent(interval=1.0)) / 100


def load_average() -> float:
    """Processes that ran or waited to, on average over the last minute."""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        told = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()
