"""Learning of SIGTERM, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, os, signal, time
from heats.lane import preemption

told = []
preemption._listen()
preemption.on_preemption(lambda: told.append(os.getpid()))
os.kill(os.getpid(), signal.SIGTERM)
assert told == [os.getpid()], told

for _ in range(50):  # Ended at once, in the midst of being born.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM, child.exitcode


def gone():
    raise OSError


preemption._told[:] = [gone]
os.kill(os.getpid(), signal.SIGTERM)
print("never comes here")
"""


def test_worker_tells_and_lives_but_its_forked_children_end() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (-15, ""), run.stderr
