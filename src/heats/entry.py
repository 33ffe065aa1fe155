"""The entry point of an app: bad input becomes one message and exit code 2."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from heats.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

_FULL_ERROR = "HYDRA_FULL_ERROR"


def clear_errors(main: Callable[[], Any]) -> Callable[[], Any]:
    """`main`, a `@hydra.main` function, saying in one message what is wrong with its command line.

    What Hydra and heats refuse ends the process with exit code 2 and no traceback, Ctrl-C with 130.
    With HYDRA_FULL_ERROR=1 in the environment everything is raised as it is. Where `heats up` runs,
    a process that it keeps runs the program instead: see heats.up.
    """

    @functools.wraps(main)
    def guarded() -> Any:
        if _is_plain(sys.argv[1:]):
            from heats.up.client import hand_over

            code = hand_over()
            if code is not None:
                raise SystemExit(code)
        if os.environ.get(_FULL_ERROR) == "1":
            return main()
        os.environ[_FULL_ERROR] = "1"  # Else Hydra prints what it likes and ends with 1.
        try:
            return main()
        except KeyboardInterrupt:  # Before the sweep itself takes care of it.
            raise SystemExit(ExitCode.INTERRUPTED) from None
        except Exception as exc:
            if not _is_about_input(exc):
                raise
            from heats.compose import config_error
            from heats.errors import HeatsError

            error = exc if isinstance(exc, HeatsError) else config_error(exc)
            sys.stderr.write(f"{error}\n")
            raise SystemExit(ExitCode.BAD_INPUT) from exc
        finally:
            os.environ.pop(_FULL_ERROR, None)

    return guarded


def _is_plain(arguments: list[str]) -> bool:
    """Whether the command line asks for training, and not for help or a look at the config."""
    return all(each in ("-m", "--multirun") or not each.startswith("-") for each in arguments)


def _is_about_input(exc: Exception) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from heats.errors import ConfigError, LedgerError

    return isinstance(exc, HydraException | OmegaConfBaseException | ConfigError | LedgerError)
