"""The report: one HTML file, without network access, made from a run directory's files.

It can be written at any time: during a run, after it, after a crash. Texts of models and users are
embedded as data, never as markup.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from retrain.errors import ConfigError, first_of
from retrain.observe.callbacks import has_trend, tenths
from retrain.observe.failure import ERROR
from retrain.observe.journal import Row, known, read_lines
from retrain.observe.progress import clock_text, milestones, near, samples_in, short
from retrain.observe.run_dir import (
    EVENTS,
    REPORT,
    ROLLOUTS,
    read_config,
    read_events,
    read_metrics,
    surviving,
    write_whole,
)
from retrain.report.charts import charts, histogram
from retrain.report.samples import Samples
from retrain.report.timeline import Event, Fates, fates, timeline, waste, without_outages
from retrain.report.verdict import bottleneck, findings
from retrain.supervision.jsonable import plain
from retrain.supervision.locks import in_use

MAX_CAUSES = 20
MAX_ERROR = 4000
"""Characters of error.txt."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir` and return its path.

    Raises ConfigError if there is no run or the report can't be written.
    """
    if not (run_dir / EVENTS).is_file():
        raise ConfigError(f"no run in {run_dir}, expected a run directory such as runs/quickstart")
    template = files("retrain.report").joinpath("report.html").read_text(encoding="utf-8")
    page = template.replace("{{data}}", _embedded(digest(run_dir)))
    write_whole(run_dir / REPORT, page)
    return run_dir / REPORT


def digest(run_dir: Path) -> dict[str, Any]:  # any: JSON values
    """Everything that the page shows, as JSON values."""
    every_event = list(read_events(run_dir))
    events = surviving(every_event)
    status = _status(run_dir, every_event)
    rows = read_metrics(run_dir)
    samples = Samples(read_lines(run_dir / ROLLOUTS))
    config, shown = read_config(run_dir)
    found = fates(events)
    wasted = waste(found)
    outcomes = found.outcomes
    evaluations = [event for event in events if event["event"] == "eval"]
    groups_per_step = config.get("train", {}).get("groups_per_step")
    return {
        "name": run_dir.absolute().name,
        "status": status,
        "failure": _failure(run_dir, status, every_event),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "facts": _facts(events, rows, found, config, evaluations),
        "bottleneck": bottleneck(
            without_outages(rows, events),
            samples.seconds,
            config.get("staleness", {}).get("target"),
        ),
        "findings": findings(rows, outcomes, samples.stop_reasons, wasted, groups_per_step),
        "history": _history(every_event),
        "charts": charts(rows, evaluations),
        "components": [
            {"name": name, **histogram(values)} for name, values in samples.components.items()
        ][:MAX_CAUSES],
        "timeline": timeline(events, found),
        "waste": wasted,
        "outcomes": _counted(outcomes),
        "errors": _counted(samples.errors),
        "stops": _counted(samples.stop_reasons),
        "samples": samples.picked(),
        "rollouts": samples.count,
        "evaluated": samples.evaluated,
        "config": shown,
    }


def _status(run_dir: Path, events: Sequence[Event]) -> str:
    ends = [event for event in events if event["event"] in ("end", "resumed")]
    if ends and ends[-1]["event"] == "end":  # first, since the run itself writes this page
        return str(ends[-1].get("status", "ended"))
    return "running" if in_use(run_dir) else "cut off"


def _failure(run_dir: Path, status: str, events: Sequence[Event]) -> dict[str, str] | None:
    """Why a run failed, and what to do next; None for any other run."""
    if status not in ("failed", "cut off"):
        return None
    error = events[-1].get("error") if events else None
    text = _cause(error) if isinstance(error, dict) else _error_file(run_dir)
    saved = any((run_dir / "checkpoints").glob("step_*"))
    command = f"run the same command with --resume --run-dir {near(run_dir.absolute())}"
    again = "start a new run, because there is no checkpoint"
    if not text and not saved:
        return None
    fix = "Fix the cause, then " if text else "To continue, "
    return {"text": text, "next": fix + (command if saved else again)}


def _cause(error: Mapping[str, str]) -> str:
    """The field `error` of an `end` event in one string."""
    line = f" ({error['line']})" if error.get("line") else ""
    return f"{error.get('type')}: {error.get('message')}{line}"


def _error_file(run_dir: Path) -> str:
    """The last words of a process that could not write its `end` event."""
    try:
        return (run_dir / ERROR).read_text(encoding="utf-8", errors="replace")[-MAX_ERROR:].strip()
    except OSError:
        return ""


def _facts(
    events: Sequence[Event],
    rows: list[dict[str, Any]],
    found: Fates,
    config: dict[str, Any],
    evaluations: Sequence[Event],
) -> list[dict[str, str]]:
    steps = config.get("train", {}).get("total_train_steps")
    n = samples_in(evaluations[-1]) if evaluations else ""
    facts = [
        ("steps", f"{rows[-1]['step'] if rows else 0}" + (f" of {steps}" if steps else "")),
        *_rewards([{k: v for k, v in row.items() if v is not None} for row in rows]),
        *((f"evaluation {place}{n}", value) for value, place in milestones(evaluations)),
        ("time", clock_text(_seconds(rows, events))),
        ("rollouts", f"{found.outcomes.total():,}"),
        ("sampled tokens", short(sum(found.tokens.values()))),
    ]
    return [{"label": label, "value": value} for label, value in facts]


def _seconds(rows: Sequence[Row], events: Sequence[Event]) -> float:
    """The time of all steps; without one, that between the first event and the last."""
    steps = sum(float(row.get("time/step") or 0.0) for row in rows)
    return steps or (float(events[-1]["time"]) - float(events[0]["time"]) if events else 0.0)


def _rewards(rows: Sequence[Row]) -> list[tuple[str, str]]:
    if has_trend(rows):
        first, last = tenths(rows)
        return [("reward, first tenth", f"{first:.3f}"), ("reward, last tenth", f"{last:.3f}")]
    rewards = [row["reward/mean"] for row in rows if known(row.get("reward/mean"))]
    return [("mean reward", f"{fmean(rewards):.3f}" if rewards else "\N{EN DASH}")]


def _history(events: Sequence[Event]) -> list[str]:
    start = float(events[0]["time"]) if events else 0.0
    words: dict[str, Callable[[Event], str]] = {
        "resumed": lambda e: (
            f"resumed from step {e.get('from_step')}"
            + (f", changed: {first_of(e['changed'])}" if e.get("changed") else "")
        ),
        "checkpoint": lambda e: f"checkpoint of step {e.get('step')}",
        "incomplete": lambda e: f"skipped an incomplete checkpoint: {e.get('checkpoint')}",
        "export": lambda e: (
            f"model exported to {e['path']}" if e.get("path") else "no model exported"
        ),
        "outage": lambda e: (
            f"waiting: {e.get('error')}" if e.get("state") == "began" else "the outage is over"
        ),
        "server": _server,
        "stalled": lambda e: f"stalled: {e.get('message')}",
        "end": lambda e: (
            f"ended: {e.get('status')}" + (f": {_cause(e['error'])}" if e.get("error") else "")
        ),
    }
    return [
        f"{clock_text(max(0.0, float(event['time']) - start))}  {words[event['event']](event)}"
        for event in events
        if event["event"] in words
    ]


def _server(event: Event) -> str:
    url, state = event.get("url"), event.get("state")
    if state == "back":
        return f"the server {url} is back after {clock_text(float(event.get('seconds') or 0.0))}"
    return f"the server {url} is {state}: {event.get('error')}"


def _counted(counter: Counter[str]) -> list[dict[str, Any]]:
    return [{"name": name, "count": count} for name, count in counter.most_common(MAX_CAUSES)]


def _embedded(data: dict[str, Any]) -> str:
    """`data` as JSON for a <script> element, which no `<` can end early."""
    text = json.dumps(plain(data), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
