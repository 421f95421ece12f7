"""What a wheel and a source archive hold, and that the wheel's content runs from anywhere."""

from __future__ import annotations

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

ROOT = Path(retrain.__file__).resolve().parent.parent
SOURCES = ("retrain", "environments", "rewards")
DATA = (
    "retrain/py.typed",
    "retrain/observe/report.html",
    "retrain/quickstart/quickstart.yaml",
    "retrain/quickstart/data/echo.jsonl",
)


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


def python_files() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for name in SOURCES
        for path in (ROOT / name).rglob("*.py")
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
    build = "from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    called(["-c", f"import sys; {build}", str(folder)], copy)
    pip = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    called([*pip, "--no-index", "--wheel-dir", str(folder), str(copy)], folder)
    return folder


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content alone, as pip would put it into site-packages."""
    target = tmp_path_factory.mktemp("site-packages")
    [wheel] = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    return target


def test_the_wheel_holds_every_module_and_all_package_data(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == python_files() | set(DATA)


def test_the_source_archive_can_build_the_same(archives: Path) -> None:
    [archive] = archives.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers()}
    assert python_files() | {*DATA, "README.md", "LICENSE", "pyproject.toml"} <= names


def test_an_installed_wheel_runs_the_quickstart_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    where = "import retrain, pathlib; print(pathlib.Path(retrain.__file__).parent.parent)"
    assert called(["-c", where], tmp_path, PYTHONPATH=str(installed)).strip() == str(installed)
    command = ["-m", "retrain.run", "quickstart", "--dry-run"]
    shown = called(command, tmp_path, PYTHONPATH=str(installed))
    assert "slot_match" in shown
    assert not list(tmp_path.iterdir())


def test_an_installed_wheel_has_its_command_and_built_ins(installed: Path, tmp_path: Path) -> None:
    [entry] = installed.glob("*.dist-info/entry_points.txt")
    assert "retrain = retrain.__main__:main" in entry.read_text()
    names = (
        "from retrain.config.plugins import built_in_names as names; "
        "print(*names('environment'), *names('reward'))"
    )
    listed = called(["-c", names], tmp_path, PYTHONPATH=str(installed)).split()
    files = {Path(name).stem for name in python_files() if not name.startswith("retrain/")}
    assert files <= set(listed)
