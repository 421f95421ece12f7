"""The progress of a run, and the texts of the console. No I/O.

Metrics that a backend doesn't report are omitted; none is required.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from retrain.observe.callbacks import TrainingResult, has_trend
from retrain.observe.journal import Row, known, shares
from retrain.observe.peak import in_words
from retrain.observe.run_dir import EVENTS, Tally

RECENT = 20
"""Steps for the estimate of the remaining time and for the trend of the reward."""
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
MAX_SHOWN_CAUSES = 5
NEXT = (
    "run the same command with --resume (from Python: resume=True) to continue from the last "
    "checkpoint"
)
_ELSEWHERE = ("reward", "no-signal groups", "failed rollouts")
"""Shown in other rows of the live display."""
MEASURES = ("loss", "perplexity", "dpo/accuracy")
"""Metrics of an evaluation on rows of a dataset."""
SCORES: Mapping[str, Callable[..., Row]] = {"eval/reward/mean": max, "eval/loss": min}
"""By which evaluations are compared, and which one is the best."""


@dataclass(slots=True)
class RunProgress:
    """The progress of one run, updated by the hooks of a callback."""

    total_steps: int
    step: int = 0
    unicode: bool = True
    clock: Callable[[], float] = time.monotonic
    rewards: list[float] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    note: str = ""
    """The last line of the display."""
    started: float = field(init=False)
    _ends: deque[float] = field(init=False)
    """When the latest steps ended."""

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._ends = deque([self.started], maxlen=RECENT + 1)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a finished step."""
        self.step, self.metrics = step, metrics
        self._ends.append(self.clock())
        reward = metrics.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self.rewards.append(reward)

    @property
    def seconds(self) -> float:
        """Since the run started or resumed."""
        return self.clock() - self.started

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the pace of the latest steps; None before the first."""
        steps = len(self._ends) - 1
        if not steps:
            return None
        return (self._ends[-1] - self._ends[0]) / steps * max(0, self.total_steps - self.step)

    @property
    def trend(self) -> float | None:
        """Mean reward of the latest steps minus that of the steps before; None if too few."""
        span = min(RECENT, len(self.rewards) // 2)
        if span < 1:
            return None
        return fmean(self.rewards[-span:]) - fmean(self.rewards[-2 * span : -span])

    def line(self) -> str:
        """The last step in one line, for a log file."""
        left = self.seconds_left
        parts = [f"step {self.step}/{self.total_steps}"]
        parts += [f"{label} {text}" for label, text in self._facts()]
        if left is not None:
            parts.append(f"{clock_text(left)} left")
        return "  ".join(parts)

    def panel(self) -> RenderableType:
        """The live display of a terminal."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        reward = self.metrics.get("reward/mean")
        if reward is not None:
            rows.add_row("reward", self._reward(reward))
        facts = [fact for fact in self._facts() if fact[0] not in _ELSEWHERE]
        if facts:
            shown = [Text.assemble((f"{label} ", "dim"), text) for label, text in facts]
            rows.add_row("step", Text("   ").join(shown))
        rows.add_row(self.tally.unit, self._rollouts())
        note = [Text(self.note, style="bold")] if self.note else []
        return Group(self._bar(), rows, *note)

    def _bar(self) -> RenderableType:
        left, done = self.seconds_left, self.step >= self.total_steps
        since = clock_text(self.clock() - self._ends[-1])
        under_way = "" if done else f"step {self.step + 1} for {since}"
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"step {self.step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=self.step, width=32),
            "" if left is None else Text(f"{clock_text(left)} left"),
            Text(under_way, style="dim"),
        )
        return bar

    def _reward(self, reward: float) -> Text:
        text = Text(f"{number(reward)}  ", style="bold")
        text.append(sparkline(self.rewards, 32, self.unicode), style="green")
        if self.trend is not None:
            span = min(RECENT, len(self.rewards) // 2)
            text.append(f"  {self.trend:+.3f} over {span} steps", style="dim")
        return text

    def _rollouts(self) -> Text:
        scored, failed = _outcomes(self.tally)
        text = Text(scored)
        text.append(f"   {failed:,} failed", style="red" if failed else "dim")
        dropped = _dropped(self.tally)
        text.append(f"   groups dropped: {dropped or 'none'}", style="" if dropped else "dim")
        if (flat := self.metrics.get("groups/zero_signal")) is not None:
            text.append(f"   no-signal groups in the last step: {flat:.0f}", style="dim")
        return text

    def _facts(self) -> list[tuple[str, str]]:
        known = [
            ("reward", "reward/mean", number),
            *(
                (f"reward {seat}", f"reward/{seat}/mean", number)
                for seat in sorted(self.tally.seats)
            ),
            ("loss", "loss", number),
            ("grad norm", "grad_norm", number),
            ("entropy", "entropy", number),
            ("staleness", "staleness/mean", number),
            ("tokens/s", "tokens/per_second", rate),
            ("trainer idle", "trainer/idle_fraction", "{:.0%}".format),
            ("no-signal groups", "groups/zero_signal", short),
            ("failed rollouts", "rollouts/failed", short),
        ]
        finite = {key: value for key, value in self.metrics.items() if not math.isnan(value)}
        return [(label, f(finite[key])) for label, key, f in known if key in finite]


def evaluation(metrics: Mapping[str, float]) -> str:
    """The result of an evaluation: its metrics, then failures, if any."""
    found = {key.removeprefix("eval/"): value for key, value in metrics.items()}
    failed = {key: found[key] for key in sorted(found) if key.endswith("/failed") and found[key]}
    measures = ("reward/mean", *sorted(key for key in found if key.startswith("pass@")), *MEASURES)
    parts = [f"{key} {number(found[key])}" for key in measures if key in found]
    return "  ".join([*parts, *(f"{key} {short(value)}" for key, value in failed.items())])


def milestones(evaluations: Sequence[Row]) -> list[tuple[str, str]]:
    """The first, the best and the last of these results, each once, as (value, step).

    They are compared by the mean reward, or by the loss.
    """
    for key, least_or_most in SCORES.items():
        if found := [one for one in evaluations if known(one.get(key))]:
            first, best, last = found[0], least_or_most(found, key=itemgetter(key)), found[-1]
            marks = {"best": best, "last": last} if len(found) > 1 else {}
            chosen = {id(one): one for one in (first, best, last)}
            return [(number(one[key]), _place(one, marks)) for one in chosen.values()]
    return []


def _place(one: Row, marks: Mapping[str, Row]) -> str:
    """When an evaluation took place, and which of the marked ones it is."""
    names = ", ".join(name for name, other in marks.items() if other is one)
    step = f"at step {one['eval/step']:.0f}" if one["eval/step"] else "before training"
    return f"{step} ({names})" if names else step


def samples_in(evaluation: Row) -> str:
    """The number of rollouts, or of rows, that its mean is over: `, n=24`."""
    counts = (evaluation.get(key) for key in ("eval/rollouts/ok", "eval/rows/ok"))
    return next((f", n={count:.0f}" for count in counts if known(count)), "")


def closing(
    result: TrainingResult, tally: Tally, seconds: float, *, resumed: bool = False
) -> list[tuple[str, str]]:
    """The summary at the end of a run, as (label, text) lines."""
    steps = counted_steps(result.total_steps)
    lines: list[tuple[str, str]] = [(result.status, f"{steps} in {clock_text(seconds)}")]
    lines += _course(result)
    if result.evaluations:
        results = " -> ".join(map(" ".join, milestones(result.evaluations)))
        lines.append(("eval", results + samples_in(result.evaluations[-1])))
    scored, failed = _outcomes(tally)
    since = " since the resume" if resumed else ""
    label = "rollouts" if tally.unit == "rollouts" else "rows"
    lines.append((label, f"{scored}, {failed:,} failed{since}"))
    if held_out := tally.evaluated.total():
        lines.append(
            ("", f"{held_out:,} in evaluations, {held_out - tally.evaluated['ok']:,} failed")
        )
    lines += [("", f"{n:,} x {cause}") for cause, n in tally.errors.most_common(MAX_SHOWN_CAUSES)]
    if tally.drops:
        lines.append(("dropped", f"groups: {_dropped(tally)}"))
    if tally.memory:
        lines.append(("memory", in_words(tally.memory)))
    return lines + _places(result)


def _course(result: TrainingResult) -> list[tuple[str, str]]:
    """How the reward changed, or the loss of a run without rewards."""
    if has_trend(result.history):
        first, last = result.first_tenth_reward, result.last_tenth_reward
        moved = f"{first:.3f} in the first tenth -> {last:.3f} in the last ({last - first:+.3f})"
        return [("reward", moved)]
    if rewards := [row["reward/mean"] for row in result.history if known(row.get("reward/mean"))]:
        few = counted_steps(len(rewards))
        return [("reward", f"{fmean(rewards):.3f} on average over {few}: too few for a trend")]
    losses = [row["loss"] for row in result.history if "loss" in row]
    if len(losses) < 2:
        return []
    return [("loss", f"{number(losses[0])} in the first step -> {number(losses[-1])}")]


def _places(result: TrainingResult) -> list[tuple[str, str]]:
    report = result.run_dir / "report.html"
    places = (
        ("files", result.run_dir),
        ("model", result.model),
        ("best", result.best_checkpoint_path),
        ("report", report if report.is_file() else None),
    )
    lines = [(label, near(place)) for label, place in places if place is not None]
    stopped = result.status in ("interrupted", "failed")
    resumable = (result.run_dir / EVENTS).exists()
    if stopped and resumable and any((result.run_dir / "checkpoints").glob("step_*")):
        lines.append(("next", NEXT))
    return lines


def counted_steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def near(path: Path | str) -> str:
    """`path`, relative to the working directory if that exists and contains it."""
    with suppress(OSError, ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return str(path)


def sparkline(values: Sequence[float], width: int, unicode: bool = True) -> str:
    """The curve of `values` in at most `width` characters, each the mean of its part."""
    if not values:
        return ""
    means = [fmean(some) for some in shares(values, width)]
    low, high = min(means), max(means)
    bars = BARS if unicode else ASCII_BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def clock_text(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Three decimals, or scientific notation if those would hide the value."""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def short(value: float) -> str:
    """A count in about five characters: 950, 12.3k, 4.5M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.1f}{suffix}"
    return f"{value:.0f}"


def rate(value: float) -> str:
    """`short`, with two significant digits below 10."""
    return f"{value:.2g}" if value < 10 else short(value)


def _outcomes(tally: Tally) -> tuple[str, int]:
    """How many rollouts were scored, or rows of the dataset read; and how many failed."""
    ok = tally.outcomes["ok"]
    done = "scored" if tally.unit == "rollouts" else "read"
    return f"{ok:,} {done}", tally.outcomes.total() - ok


def _dropped(tally: Tally) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in tally.drops.most_common())
