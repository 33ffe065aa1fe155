"""The tracking root, and the MLflow store of its sweeps."""

from __future__ import annotations

from pathlib import Path

from heats.errors import ConfigError, LedgerError

DEFAULT_ROOT = "mlruns"


def find_root(root: Path | None) -> Path:
    """The tracking root: the one given, or `mlruns` here or in the nearest folder above.

    Raises:
        ConfigError: There is none.
    """
    if root is not None:
        if root.is_dir():
            return root.absolute()
        msg = f"--root {root}: there is no such folder."
        raise ConfigError(msg)
    found = find_above(DEFAULT_ROOT)
    if found is None or not found.is_dir():
        msg = (
            f"There is no {DEFAULT_ROOT} folder in {Path.cwd()} or above it. Run this in the folder"
            " of the sweep, or give --root."
        )
        raise ConfigError(msg)
    return found


def find_above(name: str) -> Path | None:
    """What has this name in the current directory or in the nearest folder above; else None."""
    here = Path.cwd()
    found = (folder / name for folder in (here, *here.parents))
    return next((path for path in found if path.exists()), None)


def store_uri(root: Path) -> str:
    """The store of the newest sweep; the one in the root where that has moved with its folder.

    Raises:
        ConfigError: There is no store yet.
    """
    from heats.tracking.ledger import list_sweeps, read_sweep

    own = root / "mlflow.db"
    for sweep_dir in list_sweeps(root):
        try:
            uri = read_sweep(sweep_dir).start.tracking_uri
        except LedgerError:
            continue
        scheme, _, path = uri.partition(":///")
        if scheme != "sqlite" or Path(path).exists():
            return uri
        break
    if own.exists():
        return f"sqlite:///{own}"
    msg = f"There is no MLflow store in {root} yet: run a sweep first, or give another --root."
    raise ConfigError(msg)
