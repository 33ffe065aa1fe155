"""What user code would have removed after a report, had the report not stopped its trial."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


class TemporaryFolders:
    """Folders that are made among the temporary files from now on.

    Many a callback writes a checkpoint there, reports it, and then removes it (Ray Train's for
    Lightning does). A stop comes in between.
    """

    def __init__(self) -> None:
        """Note what is there already: it belongs to others."""
        self._before = frozenset(os.listdir(tempfile.gettempdir()))

    def remove(self, path: str) -> None:
        """Remove a folder, unless it or what it is in is older, or it is elsewhere."""
        root, folder = Path(tempfile.gettempdir()).resolve(), Path(path).resolve()
        if root in folder.parents and folder.relative_to(root).parts[0] not in self._before:
            shutil.rmtree(folder, ignore_errors=True)
