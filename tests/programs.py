"""Programs that tests start as users do, with everything that those start in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

MARK = "HEATS_TEST_MARK"
HEATS = str(Path(sys.executable).with_name("heats"))


class Program:
    """A Python program with everything it starts, which inherits a mark in the environment."""

    def __init__(self, folder: Path, mark: str | None = None) -> None:
        """`mark` is that of another program whose processes count as this one's too."""
        self.folder = folder
        self.mark = mark or uuid.uuid4().hex
        self.output = ""
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        """Start `python ARGUMENTS` in a session of its own."""
        self._log = (self.folder / f"output-{uuid.uuid4().hex}.txt").open("wb")
        environ = {**os.environ}
        environ.pop("PYTEST_CURRENT_TEST", None)  # It changes within a test.
        self._child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environ | {MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> int:
        """Start and wait; the exit code."""
        self.start(*arguments)
        return self.wait()

    def wait(self, timeout_s: float = 240) -> int:
        """The exit code."""
        assert self._child is not None
        code = self._child.wait(timeout_s)
        self._log.close()
        self.output = Path(self._log.name).read_text(errors="replace")
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to what it started."""
        assert self._child is not None
        self._child.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """The living processes that the program or its descendants are."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.is_running():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def remaining(self, within_s: float) -> list[str]:
        """Names of the processes that are still there after so long."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = []
        for process in left:
            try:
                names.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
        return names

    def kill(self) -> None:
        """End everything at once."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        if self._child is not None:
            self._child.wait(10)
            self._log.close()
