"""The arithmetic and the runner under every benchmark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from benchmarks.timing import run_timed, slope

if TYPE_CHECKING:
    from pathlib import Path


def test_slope_leaves_out_what_a_start_costs_once() -> None:
    found = slope([(0, count, 12.0 + 0.05 * count) for count in (10, 40, 160)])

    assert found.fitted == pytest.approx(0.05)
    assert found.pairwise == pytest.approx({"10-40": 0.05, "40-160": 0.05})


def test_slope_of_one_repeat_spreads_over_neighbouring_counts() -> None:
    found = slope([(0, 10, 10.0), (0, 20, 11.0), (0, 30, 14.0)])

    assert (found.low, found.high) == pytest.approx((0.1, 0.3))


def test_slope_of_several_repeats_spreads_over_their_own_fits() -> None:
    found = slope([(0, 10, 10.0), (0, 20, 11.0), (1, 10, 10.0), (1, 20, 12.0)])

    assert found.repeats == pytest.approx([0.1, 0.2])
    assert (found.low, found.high) == pytest.approx((0.1, 0.2))
    assert found.fitted == pytest.approx(0.15)


def test_run_timed_gives_the_end_of_what_a_failed_program_printed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such luck"):
        run_timed(["-c", "raise SystemExit('no such luck')"], tmp_path)


def test_run_timed_runs_in_the_folder_with_the_project_on_the_path(tmp_path: Path) -> None:
    code = "import json, benchmarks; open('out', 'w').write(json.dumps(benchmarks.__name__))"

    timed = run_timed(["-c", code], tmp_path)

    assert json.loads((tmp_path / "out").read_text(encoding="utf-8")) == "benchmarks"
    assert timed.wall_s > 0
