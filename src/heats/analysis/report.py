"""One HTML file about a sweep that opens anywhere: no server, no network, no other file."""

from __future__ import annotations

import logging
import os
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from heats.analysis.plots import charts
from heats.analysis.style import COLORS, WORDS
from heats.analysis.tables import (
    argv,
    duration_s,
    ranked,
    shown_value,
    why_ended,
)
from heats.tracking.provenance import redact_text
from heats.wording import duration, number, param, short_names

if TYPE_CHECKING:
    from pathlib import Path

    from heats.record import SweepRecord, TrialRecord
    from heats.tracking.provenance import Provenance

logger = logging.getLogger(__name__)

NUM_TOP_TRIALS = 20


def write_report(
    record: SweepRecord, path: Path, *, state: str, origin: Provenance | None = None
) -> Path:
    """Write the report of a sweep and give its path; a report that was there is replaced.

    Args:
        record: The sweep, which may still run.
        path: The HTML file to write; missing folders are made.
        state: `running`, `finished` or `interrupted`, as `tables.sweep_state` says.
        origin: Where the sweep's code came from, if that is known.
    """
    html = render_report(record, state=state, origin=origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(html, encoding="utf-8")
    draft.replace(path)
    return path


def render_report(record: SweepRecord, *, state: str, origin: Provenance | None = None) -> str:
    """The report as HTML text; everything that users named is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("heats.analysis", "."), autoescape=True, undefined=StrictUndefined
    )
    sections = [
        {
            "key": chart.key,
            "title": chart.title,
            "caption": chart.caption,
            "why_not": chart.why_not,
            # Plotly's JSON writes `<`, `>` and `/` as escapes, so that no text can end the script.
            "figure": Markup(chart.figure.to_json(engine="json")) if chart.figure else None,
        }
        for chart in charts(record)
    ]
    return environment.get_template("report.html.j2").render(
        name=record.start.study_name,
        state=state,
        facts=_facts(record, origin),
        counts=[
            {"word": word, "count": record.counts()[trial_state], "color": COLORS[trial_state]}
            for trial_state, word in WORDS.items()
        ],
        best=_best(record),
        metric=record.objective.name,
        resource=record.objective.resource,
        command=command_line(record),
        space=_space(record),
        fixed=[redact_text(override) for override in record.start.fixed],
        charts=sections,
        table=_top_table(record),
        num_trials=len(record.trials),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotlyjs=Markup(get_plotlyjs()),
    )


def log_report(record: SweepRecord, html_path: Path, *, root: Path) -> bool:
    """Store the report at the sweep's parent run; False, with a warning, where that fails.

    Args:
        record: The sweep.
        html_path: The file that `write_report` wrote.
        root: The tracking root of the sweep.
    """
    from heats.tracking.runs import Runs

    runs = Runs(record.start, root=root)
    try:
        runs.check()
        run_id = record.run_id or runs.ensure_parent().run_id
        runs.client().log_artifact(run_id, str(html_path))
    except Exception as exc:  # noqa: BLE001 - any tracker trouble; the file itself is written
        logger.warning(
            "The report was not logged to MLflow at %s: %s It is at %s.",
            runs.shown_uri,
            exc,
            html_path,
        )
        return False
    return True


def command_line(record: SweepRecord) -> str:
    """The command that started the sweep, as one would type it."""
    arguments = argv(record)
    if record.start.module:
        return shlex.join(["python", "-m", record.start.module, *arguments[1:]])
    return shlex.join(["python", *arguments]) if arguments else ""


def _facts(record: SweepRecord, origin: Provenance | None) -> list[tuple[str, str]]:
    start = record.start
    facts = [
        ("objective", f"{record.objective.direction.value} {record.objective.name}"),
        ("started", datetime.fromtimestamp(start.time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("wall time", duration(record.wall_s)),
    ]
    if scheduler := start.settings.get("scheduler"):
        facts.append(("scheduler", str(scheduler)))
    facts.append(("experiment", start.experiment))
    if record.run_id:
        facts.append(("parent run", record.run_id))
    if origin is not None and origin.commit is not None:
        changed = ", with uncommitted changes" if origin.is_dirty else ""
        facts.append(("git commit", f"{origin.commit[:12]}{changed}"))
    if record.ended is not None and record.ended.reason:
        facts.append(("ended", record.ended.reason))
    return facts


def _best(record: SweepRecord) -> dict[str, Any] | None:
    best = record.best()
    if best is None:
        return None
    checkpoint = best.best_checkpoint(record.objective)
    return {
        "number": best.number,
        "value": number(best.value),
        "params": [(key, param(value)) for key, value in best.params.items()],
        "run_id": best.run_id,
        "checkpoint": checkpoint.checkpoint if checkpoint else None,
    }


def _space(record: SweepRecord) -> list[tuple[str, str]]:
    dimensions = record.start.space.get("dimensions", {})
    return [(key, _distribution_text(spec)) for key, spec in dimensions.items()]


def _distribution_text(spec: Any) -> str:
    """An Optuna distribution as people write one: `0.0001 to 1, log`."""
    if not isinstance(spec, dict) or not isinstance(spec.get("attributes"), dict):
        return str(spec)
    attributes = spec["attributes"]
    if "choices" in attributes:
        return ", ".join(str(choice) for choice in attributes["choices"])
    text = f"{number(attributes.get('low'))} to {number(attributes.get('high'))}"
    if attributes.get("log"):
        text += ", log"
    if attributes.get("step") not in (None, 1):
        text += f", step {number(attributes['step'])}"
    return text


def _top_table(record: SweepRecord) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for trial in record.trials.values() for key in trial.params))
    short = short_names(keys)
    return {
        "params": [(key, short[key]) for key in keys],
        "rows": [_row(trial, record, keys) for trial in ranked(record)[:NUM_TOP_TRIALS]],
    }


def _row(trial: TrialRecord, record: SweepRecord, keys: list[str]) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": WORDS[trial.state],
        "color": COLORS[trial.state],
        "value": number(shown_value(trial, record.objective)),
        "resource": trial.last.resource if trial.last else "-",
        "duration": duration(duration_s(trial)),
        "params": [param(trial.params[key]) if key in trial.params else "" for key in keys],
        "why": why_ended(trial, record.objective),
    }
