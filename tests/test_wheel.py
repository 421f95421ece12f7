"""What a wheel and a source archive hold, and that the wheel's content runs from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import retrain

pytestmark = [pytest.mark.slow(2), pytest.mark.xdist_group("wheel")]  # one build, one install

ROOT = Path(retrain.__file__).resolve().parent.parent
INSIDE = {
    "configs": "*.yaml",
    "configs/agents": "*.py",
    "configs/cookbook": "*.*",
    "configs/tools": "*.py",
    "data": "*.*",
    "environments": "*.py",
    "rewards": "*.py",
}
"""Folders of the checkout that the wheel has inside the package, and their files."""
DATA = {"retrain/py.typed", "retrain/__init__.pyi", "retrain/report/report.html"}


def called(command: Sequence[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "retrain").rglob("*.py")}


def inside() -> set[str]:
    return {
        file.relative_to(ROOT).as_posix()
        for folder, pattern in INSIDE.items()
        for file in (ROOT / folder).glob(pattern)
    }


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built without an index from a copy."""
    folder = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("copy") / "retrain"
    shutil.copytree(
        ROOT,
        copy,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__"),
    )
    build = f"b.build_sdist({str(folder)!r}); b.build_wheel({str(folder)!r})"
    called(["-c", f"from setuptools import build_meta as b; {build}"], copy)
    return folder


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of a new environment, with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    [wheel] = archives.glob("*.whl")
    called(["-m", "venv", "--without-pip", str(folder)], folder)
    [site] = folder.glob("lib/python*/site-packages")
    pip = ["-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    called([*pip, "--no-compile", str(wheel)], folder)
    shown = run_installed(site, folder, "-c", "import retrain; print(retrain.__file__)")
    assert Path(shown.strip()).is_relative_to(site)
    return site


def run_installed(site: Path, folder: Path, *command: str) -> str:
    """A command in `folder`, with the installed package before this checkout's."""
    return called(command, folder, PYTHONPATH=str(site))


EACH = """
import json, os, sys
from retrain.cli.run import main

main(["quickstart", "--dry-run"])
for folder, *arguments in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.chdir(folder)
        code = main(arguments)
        sys.stdout.flush()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, arguments
"""
"""Runs commands, each in a folder and in a process of its own, in which a dry run went before: all
that one imports is there."""


def valid(runs: list[list[str]], package: Path) -> None:
    """Dry runs of `package`; of each its folder and arguments."""
    dry = json.dumps([[*run, "--dry-run"] for run in runs])
    output = called(["-W", "ignore", "-c", EACH, dry], package, PYTHONPATH=str(package))
    assert output.count("is valid") == 1 + len(runs)


def test_the_wheel_holds_every_module_and_all_package_data(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == modules() | DATA | {f"retrain/{name}" for name in inside()}


def test_an_install_adds_one_package_and_its_metadata(installed: Path) -> None:
    found = sorted(path.name for path in installed.iterdir())
    assert found == ["retrain", f"retrain_rl-{retrain.__version__}.dist-info"]


def test_the_source_archive_can_build_the_same(archives: Path, tmp_path: Path) -> None:
    [archive] = archives.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers()}
    assert modules() | inside() | {*DATA, "README.md", "LICENSE", "pyproject.toml"} <= names
    pip = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    called([*pip, "--wheel-dir", str(tmp_path), str(archive)], tmp_path)
    [again], [wheel] = tmp_path.glob("*.whl"), archives.glob("*.whl")
    with zipfile.ZipFile(again) as first, zipfile.ZipFile(wheel) as second:
        assert set(first.namelist()) == set(second.namelist())


def test_an_installed_wheel_runs_the_included_configs_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    valid([[str(tmp_path), name, "model=tiny"] for name in names], installed)
    assert not list(tmp_path.iterdir())


def test_an_installed_wheel_has_its_command_and_built_ins(installed: Path, tmp_path: Path) -> None:
    [entry] = installed.glob("*.dist-info/entry_points.txt")
    assert "retrain = retrain.cli.commands:main" in entry.read_text()
    names = (
        "from retrain.config.plugins import FILES, built_in_names; "
        "print({kind: built_in_names(kind) for kind in FILES})"
    )
    listed = run_installed(installed, tmp_path, "-c", names)
    assert listed == called(["-c", names], ROOT)


def test_messages_name_the_command_that_installs_an_extra(installed: Path, tmp_path: Path) -> None:
    script = "from retrain.errors import install_command; print(install_command('remote'))"
    output = run_installed(installed, tmp_path, "-c", script)
    assert output == "pip install 'retrain-rl[remote]'\n"
    assert called(["-c", script], ROOT) == "pip install -e '.[remote]'\n"
    elsewhere = called(["-c", script], tmp_path, PYTHONPATH=str(ROOT))
    assert elsewhere == f"pip install -e '{ROOT}[remote]'\n"


@pytest.mark.parametrize("layout", ["installed", "checkout"])
def test_a_user_s_own_folders_are_found_by_name_and_by_path(
    layout: str, installed: Path, tmp_path: Path
) -> None:
    sources = {
        "environments": "from retrain import Environment\nclass Mine(Environment): ...\n",
        "rewards": "def mine(completion):\n    return 1.0\n",
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(source)
    (tmp_path / "sub").mkdir()
    (tmp_path / "task.yaml").write_text("prompts: [a]\nenvironment: mine\nrewards: mine\n")
    path = installed if layout == "installed" else ROOT
    runs = []
    for environment, reward in (
        ("mine", "mine"),
        ("environments/mine.py", "rewards/mine.py:mine"),
        ("environments.mine:Mine", "rewards.mine:mine"),
    ):
        keys = [f"environment={{type: {environment}}}", f"rewards=[{{type: {reward}}}]"]
        for folder, config in ((tmp_path, "task.yaml"), (tmp_path / "sub", "../task.yaml")):
            runs.append([str(folder), config, *keys])
    valid(runs, path)
    folder, *command = runs[-1]
    shown = called(["-m", "retrain.run", *command, "--dry-run"], Path(folder), PYTHONPATH=str(path))
    assert "is valid" in shown
