"""CPU, memory and GPU use of the machine, under the metric names that MLflow's own monitor uses."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import psutil

_MIB = 1024 * 1024


class SystemMonitor:
    """Samples since its creation; percentages are of the whole machine, memory is in MB (MiB).

    Names follow `mlflow.system_metrics` (`system/cpu_utilization_percentage`, ...), so MLflow's UI
    shows them on its system metrics page.
    """

    def sample(self) -> dict[str, float]:
        """Use since this process's last sample (CPU; 0 at its first) and right now (the rest)."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / _MIB,
            "system/system_memory_usage_percentage": memory.percent,
        }
        nvml, devices = _gpus()
        for index, device in enumerate(devices):
            with suppress(nvml.NVMLError):
                used = nvml.nvmlDeviceGetMemoryInfo(device)
                values[f"system/gpu_{index}_memory_usage_megabytes"] = used.used / _MIB
                values[f"system/gpu_{index}_memory_usage_percentage"] = 100 * used.used / used.total
                rates = nvml.nvmlDeviceGetUtilizationRates(device)
                values[f"system/gpu_{index}_utilization_percentage"] = float(rates.gpu)
        return values


@cache
def _gpus() -> tuple[Any, list[Any]]:
    """The NVML module and this machine's devices; none where NVML is missing or fails."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return None, []
