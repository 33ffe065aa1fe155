"""What a run is to get, cut into requests that MLflow takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.tracking.translate import RunWrites

# MLflow takes 1,000 entities, 100 parameters, 100 tags and 1 MB in one request.
_MAX_METRICS = 800
_MAX_PAIRS = 100
_MAX_BYTES = 250_000


def batches(writes: RunWrites) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    """What a run gets, in requests that keep MLflow's limits; metrics, params and tags of each."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(*row) for row in writes.metrics]
    params = list(_chunks([Param(key, storable(text)) for key, text in writes.params.items()]))
    tags = list(_chunks([RunTag(key, storable(text)) for key, text in writes.tags.items()]))
    rows = [metrics[at : at + _MAX_METRICS] for at in range(0, len(metrics), _MAX_METRICS)]
    for at in range(max(len(rows), len(params), len(tags))):
        yield (
            rows[at] if at < len(rows) else [],
            params[at] if at < len(params) else [],
            tags[at] if at < len(tags) else [],
        )


def storable(text: str) -> str:
    """The text as every database takes it: NUL and halves of surrogate pairs become U+FFFD."""
    whole = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
    return whole.replace("\x00", "\ufffd")


def _chunks(pairs: list[Any]) -> Iterator[list[Any]]:
    """Parameters or tags in groups of at most 100 and a quarter of a request's bytes."""
    group: list[Any] = []
    size = 0
    for pair in pairs:
        size += len(pair.key) + 4 * len(pair.value)
        if group and (len(group) == _MAX_PAIRS or size > _MAX_BYTES):
            yield group
            group, size = [], len(pair.key) + 4 * len(pair.value)
        group.append(pair)
    if group:
        yield group
