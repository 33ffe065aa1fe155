"""Which source files of the user's own a process has loaded."""

from __future__ import annotations

import sys
import sysconfig


class LoadedFiles:
    """Follows `sys.modules`; a module of an installed package, or of Python, is not the user's."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._num_modules = 0
        paths = sysconfig.get_paths()
        self._installed = tuple({f"{paths[key]}/" for key in ("stdlib", "purelib", "platlib")})

    def new(self) -> frozenset[str]:
        """Absolute paths of the files that were loaded since the last call."""
        if len(sys.modules) == self._num_modules:
            return frozenset()
        self._num_modules = len(sys.modules)
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        new = {
            file
            for file in files - self._known
            if isinstance(file, str)
            and file.startswith("/")
            and not file.startswith(self._installed)
        }
        self._known |= new
        return frozenset(new)
