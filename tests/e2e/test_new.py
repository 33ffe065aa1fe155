"""A project of `heats new`: all of its own tests, its tiny sweep included."""

from __future__ import annotations

from pathlib import Path

from tests.programs import HEATS, Program


def test_new_project_passes_all_of_its_tests(tmp_path: Path) -> None:
    program = Program(tmp_path)
    try:
        assert program.run(HEATS, "new", "digits") == 0, program.output
        assert program.run("-m", "pytest", "-q", "digits") == 0, program.output
        assert "5 passed" in program.output
        assert program.remaining(within_s=5) == []
    finally:
        program.kill()
    made = {path.name for path in (tmp_path / "digits").iterdir()}
    assert not made & {"mlruns", "multirun", "outputs"}  # Its tests leave nothing behind.
