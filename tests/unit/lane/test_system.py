from __future__ import annotations

from heats.lane.system import SystemMonitor


def test_sample_has_the_names_that_mlflows_ui_looks_for_and_sane_values() -> None:
    sample = SystemMonitor().sample()
    names = {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
    }
    assert names <= set(sample)
    assert all(name in names or name.startswith("system/gpu_") for name in sample)
    for name, value in sample.items():
        assert isinstance(value, float)
        assert 0 <= value <= (100 if name.endswith("_percentage") else 1e9)
