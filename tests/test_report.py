"""The report: what it says, that it holds together after a crash, and that text stays text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from retrain.errors import ConfigError
from retrain.observe.rollout_lines import encoded
from retrain.observe.run_dir import RunDirectory
from retrain.report import page as report_module
from retrain.report.charts import charts, thin
from retrain.report.page import digest, write_report
from retrain.report.samples import MAX_TEXT, PICKED, Samples
from retrain.report.timeline import MAX_INTERVALS, fates, timeline, waste, without_outages
from retrain.report.verdict import bottleneck, findings
from tests.observed import played, write_run
from tests.run_dir_kit import config


def embedded(page: str) -> dict[str, Any]:
    """The data of a page, as a browser would find it: up to the first end of the element."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_a_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "maths")
    report = write_report(tmp_path / "maths")
    page = report.read_text(encoding="utf-8")
    assert report == tmp_path / "maths" / "report.html"
    assert "{{" not in page
    assert not re.findall(r"""(?:src|href)=|url\((?!#)|@import|fetch\(""", page)
    assert [a for a in re.findall(r"https?://[^\s\"']+", page) if "www.w3.org" not in a] == []
    assert embedded(page)["name"] == "maths"


def test_what_a_model_wrote_is_never_markup(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \udc80"
    write_run(tmp_path / "run", reply=hostile)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "innerHTML" not in page
    assert embedded(page)["samples"]["first"][0]["messages"][-1]["content"] == hostile


@pytest.mark.parametrize(
    ("values", "std", "axis"),
    [
        ([0.375, 0.417], 0.5, (0.0, 1.0)),  # one rollout of 24 is no climb
        ([2.0, 2.1], 0.5, (2.05 - 0.2, 2.05 + 0.2)),  # two standard errors on each side
        ([-3.0, 3.0], 0.5, (-3.0, 3.0)),
        ([5.0, 6.0], None, (5.0, 6.0)),
    ],
)
def test_the_axis_of_an_evaluation_shows_noise_as_noise(values, std, axis) -> None:
    spread = {} if std is None else {"eval/reward/std": std, "eval/rollouts/ok": 25}
    evaluations = [
        {"eval/step": step, "eval/reward/mean": value, **spread}
        for step, value in enumerate(values)
    ]
    [chart] = charts([], evaluations)
    assert chart["axis"] == pytest.approx(axis)
    [loss] = charts([], [{"eval/step": 0, "eval/loss": 0.5}, {"eval/step": 1, "eval/loss": 0.4}])
    assert loss["axis"] is None


def test_the_report_has_the_first_the_best_and_the_last_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        for step, score in ((0, 0.25), (2, 0.75), (4, 0.5)):
            found = {"eval/step": step, "eval/reward/mean": score, "eval/rollouts/ok": 24}
            file.write(json.dumps({"event": "eval", "time": 9.0, **found}) + "\n")
    facts = {f["label"]: f["value"] for f in digest(tmp_path / "run")["facts"]}
    found = [value for label, value in facts.items() if label.startswith("evaluation")]
    assert found == ["0.250", "0.750", "0.500"]
    assert all("n=24" in label for label in facts if label.startswith("evaluation"))


def test_a_skipped_update_is_no_finding(tmp_path: Path) -> None:
    """It has no entropy, which other steps have."""
    rows = [
        {"step": 1, "entropy": 1.0, "tokens/trained": 9},
        {"step": 2, "entropy": None, "tokens/trained": 0, "nonfinite": ["entropy"]},
    ]
    assert not findings(rows, Counter(), Counter(), [], 4)
    rows[1]["tokens/trained"] = 9
    assert len(findings(rows, Counter(), Counter(), [], 4)) == 1
    assert not findings(rows[1:], Counter(), Counter(), [], 4), "the backend never reports it"


def test_the_digest_tells_what_happened(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    data = digest(tmp_path / "run")
    assert data["status"] == "completed"
    assert {fact["label"]: fact["value"] for fact in data["facts"]} == {
        "steps": "4 of 4",
        "mean reward": "0.625",
        "time": "0:04",
        "rollouts": "24",
        "sampled tokens": "48",
    }
    assert data["waste"] == [
        {"fate": "trained", "groups": 8, "tokens": 32},
        {"fate": "stale", "groups": 4, "tokens": 16},
    ]
    assert data["outcomes"] == [{"name": "ok", "count": 21}, {"name": "invalid", "count": 3}]
    assert data["errors"] == [{"name": "it broke", "count": 3}]
    assert data["bottleneck"]["sentence"].startswith("The trainer waited for rollouts 60%")
    assert "staleness.target (now 1)" in data["bottleneck"]["advice"]
    assert any("tinker://a/weights/b" in line for line in data["history"])
    assert any("were too stale" in finding for finding in data["findings"])


def test_a_report_of_a_run_under_way_or_cut_off(tmp_path: Path) -> None:
    write_run(tmp_path / "run", end=False)
    assert digest(tmp_path / "run")["status"] == "cut off"
    for name in ("events", "metrics", "rollouts"):
        with (tmp_path / f"run/{name}.jsonl").open("a") as file:
            file.write('{"step": 99, "torn')
    assert len(digest(tmp_path / "run")["charts"][0]["series"][0]["points"]) == 4
    with RunDirectory.open(tmp_path / "run", config(), resume=True) as run_dir:
        assert digest(tmp_path / "run")["status"] == "running"
        run_dir.event("end", status="completed", step=4)
        run_dir.flush()
        assert digest(tmp_path / "run")["status"] == "completed", "though it holds the lock"


def test_a_report_right_after_the_start_is_empty_but_whole(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", config()).close()
    data = embedded(write_report(tmp_path / "run").read_text())
    assert data["charts"] == []
    assert data["timeline"] is None
    assert data["bottleneck"] is None


DOM = """
class Node {
  constructor(text) { this.nodes = []; this.text = text || ""; this.style = {}; }
  append(...more) {
    this.nodes.push(...more.map(m => m instanceof Node ? m : new Node(String(m))));
  }
  replaceChildren(...more) { this.nodes = []; this.append(...more); }
  setAttribute() {} addEventListener() {} querySelectorAll() { return []; }
  get textContent() { return this.text + this.nodes.map(n => n.textContent).join(" "); }
}
const places = {data: new Node(DATA), page: new Node(), tip: new Node()};
const document = {
  getElementById: id => places[id],
  createElement: () => new Node(), createElementNS: () => new Node(),
};
class ResizeObserver { observe() {} }
"""
"""As much of a browser as the page's script needs."""


def shown(page: str) -> str:
    """The text that a browser shows for the page."""
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    data = f"const DATA = {json.dumps(json.dumps(embedded(page)))};"
    script = f"{data}{DOM}{script}; console.log(page.textContent)"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_p13_the_top_of_a_failed_runs_page_says_why_and_what_to_do(tmp_path: Path) -> None:
    write_run(tmp_path / "run", end=False)
    with RunDirectory.open(tmp_path / "run", config(), resume=True) as run_dir:
        error = {"type": "ValueError", "message": "<b> my reward", "line": "judge.py:7"}
        run_dir.event("end", status="failed", step=4, error=error)
    (tmp_path / "run/checkpoints/step_4").mkdir()
    text = shown(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    cause = "ValueError: <b> my reward (judge.py:7)"
    steps = f"Fix the cause, then run the same command with --resume --run-dir {tmp_path}/run"
    assert (
        text.index("failed") < text.index(cause) < text.index(steps) < text.index("steps 4 of 100")
    )
    assert f"ended: failed: {cause}" in text
    assert "0.14.0" in text


def test_p13_the_report_of_a_killed_run_quotes_its_last_words(tmp_path: Path) -> None:
    write_run(tmp_path / "run", end=False)
    assert digest(tmp_path / "run")["failure"] is None
    (tmp_path / "run/error.txt").write_text("Fatal Python error: Segmentation fault\n")
    assert digest(tmp_path / "run")["failure"] == {
        "text": "Fatal Python error: Segmentation fault",
        "next": "Fix the cause, then start a new run, because there is no checkpoint",
    }


def test_a_damaged_configuration_does_not_prevent_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert yaml.safe_load(digest(tmp_path / "run")["config"])["train"]["groups_per_step"] > 0
    (tmp_path / "run/config.yaml").write_text("a: [")
    data = digest(tmp_path / "run")
    assert (data["facts"][0]["value"], data["config"]) == ("4", "a: [")


def test_what_a_resume_voids_is_not_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", end=False)
    with RunDirectory.open(tmp_path / "run", config(), resume=True) as run_dir:
        run_dir.event("resumed", from_step=0)
    data = digest(tmp_path / "run")
    assert data["waste"] == []
    assert data["history"][-1].endswith("resumed from step 0")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        write_report(tmp_path)


# charts


def test_charts_come_in_reading_order_and_leave_out_what_is_missing() -> None:
    rows = [{"step": 1, "reward/mean": 0.5, "reward/exact/mean": 0.4, "loss": None, "own": 3.0}]
    evaluations = [{"event": "eval", "time": 1.0, "eval/step": 1.0, "eval/pass@4": 0.25}]
    drawn = charts(rows, evaluations)
    assert [(chart["place"], chart["title"]) for chart in drawn] == [
        ("wide", "Reward"),
        ("wide", "Evaluation on held-out prompts"),
        ("further", "own"),
    ]
    assert drawn[0]["series"] == [
        {"name": "reward/mean", "points": [(1.0, 0.5)]},
        {"name": "reward/exact/mean", "points": [(1.0, 0.4)]},
    ]
    assert drawn[1]["series"] == [{"name": "eval/pass@4", "points": [(1.0, 0.25)]}]


def test_a_long_series_is_averaged_in_equal_shares() -> None:
    series = [(float(i), float(i)) for i in range(10_000)]
    points = thin(series, 500)
    assert len(points) == 500
    assert sum(y for _, y in points) / 500 == pytest.approx(4999.5)
    assert points[0] == (9.5, 9.5)


# timeline


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_ticks_of_an_axis_have_different_labels() -> None:
    expected = {
        (4.6512, 4.6534): ["4.652", "4.653"],
        (4.6511, 4.653): ["4.6515", "4.652", "4.6525", "4.653"],
        (0.0, 1.0): ["0", "0.25", "0.5", "0.75", "1"],
        (10_010, 10_040): ["10010", "10020", "10030", "10040"],
        (0, 4_000_000): ["0", "1.0M", "2.0M", "3.0M", "4.0M"],
        (-1e-5, 1e-5): ["-1.0e-5", "-5.0e-6", "0", "5.0e-6", "1.0e-5"],
    }
    page = Path(report_module.__file__).with_name("report.html").read_text(encoding="utf-8")
    functions = [
        found[0]
        for name in ("figure", "ticks", "tickLabels")
        if (found := re.search(rf"function {name}\(.*?\n}}\n", page, re.DOTALL))
    ]
    labels = ", ".join(f"tickLabels(ticks({low}, {high}, 4))" for low, high in expected)
    script = f"console.log(JSON.stringify([{labels}]))"
    done = subprocess.run(
        ["node", "-e", "".join([*functions, script])], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [*expected.values()]


def test_overlapping_groups_lie_on_lanes_of_their_own() -> None:
    spans = [("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 4.0), ("d", 3.5, 5.0)]
    events = [rollout(ticket, 2e9 + start, 2e9 + end) for ticket, start, end in spans]
    line = timeline(events, fates(events))
    assert line is not None
    assert [[(a, b) for a, b, *_ in lane] for lane in line["lanes"]] == [
        [(0.0, 2.0), (2.0, 4.0)],
        [(1.0, 3.0), (3.5, 5.0)],
    ]
    assert line["seconds"] == 5.0


def test_of_a_long_run_the_timeline_shows_the_end() -> None:
    events = [rollout(str(i), 2e9 + i, 2e9 + i + 0.5) for i in range(2 * MAX_INTERVALS)]
    events.insert(0, {"event": "update", "time": 2e9, "step": 1, "started": 2e9, "ended": 2e9 + 1})
    line = timeline(events, fates(events))
    assert line is not None
    assert (line["shown"], line["groups"]) == (MAX_INTERVALS, 2 * MAX_INTERVALS)
    assert line["start"] == 2e9 + MAX_INTERVALS
    assert line["training"]["update"] == []


def test_groups_that_are_neither_trained_nor_dropped_are_left() -> None:
    events = [
        {"event": "issued", "ticket": "a"},
        {**rollout("b", 2e9, 2e9 + 1), "tokens": 7},
        {"event": "dropped", "ticket": "c", "cause": "failed"},
    ]
    found = fates(events)
    assert (found.of("a"), found.of("b"), found.of("c")) == ("left", "left", "failed")
    assert waste(found) == [{"fate": "left", "groups": 2, "tokens": 7}]


def rollout(ticket: str, started: float, ended: float) -> dict[str, Any]:
    return {
        "event": "rollout",
        "time": ended,
        "ticket": ticket,
        "started": started,
        "ended": ended,
        "outcomes": ["ok", "ok"],
        "versions": [0, 1],
        "tokens": 7,
    }


# samples


def test_the_best_and_worst_rollouts_are_found_in_bounded_memory() -> None:
    rollouts = [
        {"ticket": f"0.{i}.0", "index": 0, "outcome": "ok", "reward": (i * 37 % 100) / 100}
        for i in range(100)
    ]
    held_out = [
        {"ticket": f"-1.{i}.0", "outcome": "ok", "reward": 2.0, "stop_reasons": ["length"]}
        for i in range(7)
    ]
    failed = {"ticket": "-1.7.0", "outcome": "timeout"}
    samples = Samples(iter([*held_out, *rollouts, failed]))
    assert (samples.count, samples.evaluated) == (100, 8)
    assert samples.errors == {"eval: timeout": 1}
    assert not samples.stop_reasons
    picked = samples.picked()
    assert [r["ticket"] for r in picked["eval"]] == [f"-1.{i}.0" for i in range(2, 8)]
    assert [r["reward"] for r in picked["best"]] == [0.99, 0.98, 0.97, 0.96, 0.95, 0.94]
    assert [r["reward"] for r in picked["worst"]] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert [r["ticket"] for r in picked["first"]] == [f"0.{i}.0" for i in range(PICKED)]
    assert [r["ticket"] for r in picked["last"]] == [f"0.{i}.0" for i in range(94, 100)]
    assert "failed" not in picked


def test_the_seats_of_a_rollout_are_shown_together() -> None:
    def line(index: int, **more: object) -> dict[str, object]:
        return {"ticket": "0.0.0", "index": index, "outcome": "ok", "messages": [], **more}

    games = [
        line(0, seat="X", reward=1.0),
        line(0, seat="O", reward=-1.0),
        line(1, seat="X", outcome="timeout"),
        line(1, seat="O", outcome="timeout"),
    ]
    samples = Samples([*games, line(2, reward=0.0), line(2, reward=0.5)])
    picked = samples.picked()
    assert (samples.count, samples.errors) == (6, {"timeout": 2})
    [won, *others] = picked["best"]
    assert [seat["reward"] for seat in won["seats"]] == [1.0, -1.0]
    assert [rollout["reward"] for rollout in others] == [0.5, 0.0]
    assert picked["worst"][0] == won
    assert [seat["seat"] for seat in picked["failed"][0]["seats"]] == ["X", "O"]


def test_a_very_long_message_is_cut(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.event("issued", ticket="0.0.0")
        run_dir.rollouts(encoded(played("0.0.0", "x" * (MAX_TEXT + 5), [1.0])))
    (message,) = digest(tmp_path / "run")["samples"]["first"][0]["messages"][1:]
    assert message["content"].endswith("x ... (5 more characters)")


# verdict


@pytest.mark.parametrize(
    ("wait", "update", "publish", "stage", "target", "expected"),
    [
        (6.0, 3.0, 0.5, "sample", 2, "generation-bound. | Raise staleness.target (now 2)"),
        (6.0, 3.0, 0.5, "sample", 0, "generation-bound. | staleness.target is 0"),
        (6.0, 3.0, 0.5, "environment", 2, "generation-bound. | Make the environment faster"),
        (6.0, 3.0, 0.5, "reward", 2, "generation-bound. | Make the reward faster"),
        (0.1, 9.0, 0.5, "sample", 2, "training-bound. | Generation keeps up."),
        (0.1, 4.0, 5.5, "sample", 2, "publish-bound. | Publish LoRA weights"),
        (0.1, 1.0, 0.5, "sample", 2, "look at callbacks | Generation keeps up."),
    ],
)
def test_the_bottleneck_in_words(
    wait: float, update: float, publish: float, stage: str, target: int, expected: str
) -> None:
    row = {"time/step": 10.0, "time/wait_for_batch": wait, "time/update": update}
    first = {"time/step": 100.0, "time/wait_for_batch": 100.0}
    found = bottleneck([first, {**row, "time/publish": publish}], {stage: 9.0, "other": 1}, target)
    assert found is not None
    sentence, advice = expected.split(" | ")
    assert sentence in found["sentence"]
    assert advice in found["advice"]
    assert sum(part["share"] for part in found["shares"]) == pytest.approx(1.0)


def lost(at: float, up: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": "server", "state": "lost", "time": at, "seconds": 0.0, "up": up, **fields}


def back(at: float) -> dict[str, Any]:
    return {"event": "server", "state": "back", "time": at, "seconds": 0.0, "up": 1}


def outage(state: str, at: float) -> dict[str, Any]:
    return {"event": "outage", "state": state, "time": at}


@pytest.mark.parametrize(
    ("events", "waited", "published", "away"),
    [
        ([], 8.0, 2.0, None),
        ([lost(3.0, seconds=1.0), back(6.0)], 4.0, 2.0, 4.0),
        ([lost(2.0, up=1), back(6.0)], 8.0, 2.0, None),
        ([outage("began", 1.0), lost(2.0), outage("over", 3.0), back(4.0)], 5.0, 2.0, 3.0),
        ([lost(5.0), {"event": "resumed", "time": 7.0}, back(9.0)], 6.0, 2.0, 2.0),
        ([lost(7.0), lost(9.5), back(10.5)], 7.0, 0.5, 2.5),
    ],
    ids=["none", "servers", "one of two", "both at once", "until the resume", "in publish"],
)
def test_waiting_in_outages_counts_separately(
    events: list[dict[str, Any]], waited: float, published: float, away: float | None
) -> None:
    """A step from 0 to 11 s that waits until 8, trains until 9 and publishes."""
    step = [
        {"event": "batch", "step": 1, "time": 8.0},
        {"event": "update", "step": 1, "started": 8.0, "ended": 9.0, "time": 9.0},
    ]
    row = {"step": 1, "time/step": 11.0, "time/wait_for_batch": 8.0, "time/publish": 2.0}
    events = sorted([*step, *events], key=lambda event: event["time"])
    [found] = without_outages([row], events)
    assert (found["time/wait_for_batch"], found["time/publish"]) == (waited, published)
    assert found.get("time/outages") == away


def test_advice_does_not_take_an_outage_for_slow_generation() -> None:
    row = {"time/step": 10.0, "time/wait_for_batch": 2.5, "time/update": 1.0, "time/publish": 0.5}
    found = bottleneck([{**row, "time/outages": 6.0}], {"sample": 1.0}, 1)
    assert found is not None
    assert "waited 60% of the time in outages, and for rollouts 25%" in found["sentence"]
    assert "staleness" not in found["advice"]
    assert sum(part["share"] for part in found["shares"]) == pytest.approx(1.0)
    found = bottleneck([{**row, "time/outages": 2.2}], {"sample": 1.0}, 1)
    assert found is not None
    assert "rollouts 25% of the time, and 22% in outages: generation-bound" in found["sentence"]


def test_a_healthy_run_has_no_findings() -> None:
    rows = [{"step": i, "entropy": 1.0, "groups/zero_signal": 1} for i in range(30)]
    assert findings(rows, Counter(ok=100), Counter(stop=100), [], 8) == []


@pytest.mark.parametrize(
    ("rows", "outcomes", "stops", "expected"),
    [
        ([{"loss": 1.0}, {"loss": None, "nonfinite": {"loss": "nan"}}], {}, {}, "step 2"),
        ([{"groups/zero_signal": 6}], {}, {}, "75% of the latest groups"),
        ([], {"ok": 9, "timeout": 1}, {}, "10% of the rollouts failed"),
        ([], {}, {"stop": 1, "length": 1}, "50% of the turns reached the maximum length"),
        ([{"kl/sampler_trainer": 0.5}], {}, {}, "step 1"),
        ([{"entropy": 2.0}] * 20 + [{"entropy": 0.01}] * 20, {}, {}, "Entropy fell to 0.5%"),
    ],
)
def test_what_deserves_a_look_is_found(
    rows: list[dict[str, Any]], outcomes: dict[str, int], stops: dict[str, int], expected: str
) -> None:
    numbered = [{"step": step, **row} for step, row in enumerate(rows, 1)]
    (finding,) = findings(numbered, Counter(outcomes), Counter(stops), [], 8)
    assert expected in finding
