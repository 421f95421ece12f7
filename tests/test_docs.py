"""The pages hold true: their examples run, their configs and commands are valid, their links lead
somewhere, the configuration page is current, and the metrics page names what a run writes.

A fenced block whose first line is `# name.py` or `# name.yaml` is that file, written into a folder
that all blocks of a page share, and so is what a command `cat > NAME <<'EOF'` writes. Another
python block is run there, what trains for two steps; another yaml block is a part of a config.
Commands are run as far as a dry run goes.
"""

from __future__ import annotations

import gc
import json
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

import retrain
from retrain import Group, Prompt, Trajectory
from retrain.algorithms.functional import std
from retrain.assembly import assemble
from retrain.cli.commands import COMMANDS, command
from retrain.cli.run import main
from retrain.config import load_config, parse_config
from retrain.losses import LOSSES
from retrain.observe.callbacks import tenths
from retrain.observe.run_dir import read_metrics
from retrain.pipeline.meter import Meter
from retrain.wire.vendors import TINKER, WEAVER

ROOT = Path(retrain.__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
STEPS = re.compile(r"(max_steps|total_steps|total_train_steps)=\d+")
PATH = re.compile(
    r"`((?:retrain|tests|docs|configs|data|environments|rewards|benchmarks)/[\w./]+\.\w+)`"
)
NAMED = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
DATA = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.MULTILINE | re.DOTALL)
LEAST = {"prompts": ["hello"], "rewards": "exact_match"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that a page tells to export."""
    for vendor in (TINKER, WEAVER):
        monkeypatch.setenv(vendor.key_variable, "a-key-of-a-test")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `retrain ...` command of a page, or of its `python -m` form."""
    for kind, text in blocks(page):
        for line in DATA.sub("", text).replace("\\\n", " ").splitlines() if kind == "sh" else ():
            words = shlex.split(line, comments=True)
            words = words[2:] if words[:2] == ["python", "-m"] else words
            words = words[: words.index(">")] if ">" in words else words
            if words and words[0] == "retrain.run":
                yield ["run", *words[1:]]
            elif words and words[0] == "retrain":
                yield words[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder with the repository's configs and what they name.

    Its modules go with it.
    """
    for name in ("configs", "data", "environments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "vllm-env/bin").mkdir(parents=True)  # what docs/vllm.md installs, and shares
    python = tmp_path / "vllm-env/bin/python"
    python.write_text("#!/bin/sh\necho True\n")  # vllm is installed in its environment
    python.chmod(0o755)
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if not name.startswith("retrain") and str(tmp_path) in str(
            getattr(sys.modules[name], "__file__", "")
        ):
            del sys.modules[name]
    with warnings.catch_warnings():  # of connections of an example's client, which it keeps open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def written(page: Path, folder: Path) -> list[Path]:
    """The named blocks of a page, as files, and the data that its commands write."""
    files = []
    for kind, text in blocks(page):
        for name, rows in DATA.findall(text) if kind == "sh" else ():
            (folder / name).write_text(rows, encoding="utf-8")
        if named := NAMED.match(text):
            file = folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            files.append(file)
    return files


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_examples_of_a_page_run(page: Path, folder: Path) -> None:
    files = written(page, folder)
    for file in files:
        if file.suffix == ".py":
            runpy.run_path(str(file), run_name="example")
    for kind, text in blocks(page):
        if kind == "python" and not NAMED.match(text):
            short = STEPS.sub(r"\1=2", text)
            exec(compile(short, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_configs_of_a_page_are_valid(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in written(page, folder):
        if file.suffix == ".yaml":
            assert main([str(file), "--dry-run"]) == 0, capsys.readouterr().err
    for kind, text in blocks(page):
        if kind == "yaml" and not NAMED.match(text):
            part = yaml.safe_load(text)
            assemble(parse_config({**LEAST, **part}, folder))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_commands_of_a_page_are_valid(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(page, folder)
    for name, *arguments in commands(page):
        shown = " ".join([name, *arguments])
        if name == "run":
            # the model and the run that other commands of the page make
            given = [word for word in arguments if word != "--resume"]
            given = ["model=tiny" if word.startswith("model=runs/") else word for word in given]
            assert main([*given, "--dry-run"]) == 0, shown + capsys.readouterr().err
        elif name == "check":
            assert command([name, *arguments]) == 0, shown + capsys.readouterr().out
        else:
            assert name in COMMANDS, shown


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_links_and_paths_of_a_page_lead_to_files(page: Path) -> None:
    whole = page.read_text(encoding="utf-8")
    named = [path for path in PATH.findall(whole) if "NAME" not in path]
    assert not [path for path in named if not (ROOT / path).exists()]
    text = BLOCK.sub("", whole)
    targets = [target.partition("#")[0] for target in LINK.findall(text)]
    local = [target for target in targets if target and "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_the_page_of_losses_names_each() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition("## Losses")[2].partition("## Averages")[0]
    assert all(f"`{name}`" in table for name in LOSSES)


@pytest.mark.parametrize("name", ["configuration", "scaling"])
def test_the_tables_of_a_page_are_current(name: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    present = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert script["page"](present) == present, "run: make docs"


def test_every_config_of_the_repository_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        # one begins with the model that another makes, which needn't have run
        assert main([str(file), "model=tiny", "--dry-run"]) == 0, capsys.readouterr().err


def test_every_config_of_the_cookbook_is_valid_but_for_what_is_not_on_this_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model, its data, and the package verifiers."""
    for file in sorted((folder / "configs/cookbook").glob("*.yaml")):
        config = load_config(file)
        row = '[{prompt: hello, answer: "5", solution: a, test_list: ["assert f(1) == 2"]}]'
        here = ["model=tiny", f"prompts={row}", *([f"eval.prompts={row}"] if config.eval else [])]
        if config.environment.type == "verifiers":  # needs its package
            here += ["environment={type: single_turn}", "rewards=exact_match"]
        assert main([str(file), *here, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["math", "judge", "from_trl", "thinking"])
def test_the_commands_of_a_cookbook_page_train(name: str, folder: Path) -> None:
    page = ROOT / "docs/cookbook" / f"{name}.md"
    written(page, folder)
    with ExitStack() as stack:
        extra = ["train.total_train_steps=1", "train.groups_per_step=2"]
        if name == "judge":  # the page's server, on a free port
            handler = runpy.run_path("stand_in.py")["StandIn"]
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            serving = Thread(target=server.serve_forever)
            serving.start()
            stack.callback(serving.join)
            stack.callback(server.shutdown)
            extra.append(f"rewards.0.url=http://127.0.0.1:{server.server_port}/v1")
        runs = [words for name, *words in commands(page) if name == "run"]
        assert runs
        for words in runs:
            assert main([*words, *extra]) == 0
    rows = [row for run in folder.glob("runs/*") for row in read_metrics(run)]
    assert len(rows) >= len(runs)
    assert not any(row.get("rollouts/failed") for row in rows)


@pytest.mark.slow
def test_the_environment_for_newcomers_is_learnt(folder: Path) -> None:
    [text] = [t for _, t in blocks(ROOT / "docs" / "coming-from.md") if "class OneTurn" in t]
    exec(compile(STEPS.sub(r"\1=50", text), "page", "exec"), {"__name__": "example"})
    first, last = tenths(read_metrics(folder / "runs" / "grpo"))
    assert first < 0.03  # 0.01
    assert last > 0.2  # 0.27


@pytest.mark.slow
def test_an_algorithm_a_loss_and_loggers_of_ones_own_train(folder: Path) -> None:
    written(ROOT / "docs" / "extending.md", folder)
    assert main(["mine.yaml"]) == 0
    head, *rows = (folder / "runs" / "mine" / "metrics.csv").read_text().splitlines()
    assert head == "step,reward/mean,loss"
    assert len(rows) < 200  # its callback ended the run
    assert float(rows[-1].split(",")[1]) >= 0.5


def test_the_deviation_of_the_rewards_is_the_documented_one() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    [ddof] = re.findall(r"`reward/std` .*\(`ddof` (\d)", page)
    prompt = Prompt("0.0.0", [])
    group = Group(prompt, [Trajectory(prompt, reward=value) for value in (0.0, 1.0, 5.0)])
    meter = Meter()
    meter.lap("wait_for_batch")
    assert meter.row(1, [group], {}, 0, 1)["reward/std"] == std([0.0, 1.0, 5.0], int(ddof))


@pytest.mark.slow
def test_the_example_of_the_readme_trains_and_writes_the_metrics_that_the_docs_name(
    folder: Path,
) -> None:
    written(ROOT / "README.md", folder)
    assert main(["hotter.yaml", "train.total_train_steps=2", "train.groups_per_step=2"]) == 0
    rows = (folder / "runs" / "hotter" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2
    row = json.loads(rows[-1])
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    keys = [re.sub(r"^reward/(environment|quick)/", "reward/<component>/", k) for k in row]
    assert not [key for key in keys if f"`{key}`" not in page]
