"""Imports point down, and the heavy libraries stay where they belong: read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import retrain

ROOT = Path(retrain.__file__).parent
ROOMS = [
    row.split()
    for row in (
        "types errors",
        "losses supervision",
        "wire",
        "config",
        "sampler environment sandbox",
        "chat",
        "prompts",
        "algorithms",
        "scoring",
        "agents",
        "rollout",
        "observe engine",
        "vllm",
        "service",
        "adapters",
        "assembly",
        "report",
        "pipeline",
        "trainer",
        "check",
        "cli",
        "run __main__",
    )
]
"""The rooms of CONTRIBUTING.md, in the order of imports: a room imports from earlier rows."""
ALLOWED = {
    "torch": ("engine", "vllm", "adapters.trl", "service", "trainer.nexrl"),
    "trl": ("adapters.trl",),
    "peft": ("engine", "adapters.trl", "service"),
    "httpx": ("adapters.tinker", "adapters.weaver", "adapters.remote", "wire"),
    "aiohttp": ("wire",),
}


@cache
def modules() -> dict[str, list[str]]:
    """Each module of the package, and the modules that it imports."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = list(imports(ast.parse(path.read_text(encoding="utf-8"))))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Each imported module, those for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            assert node.module
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [name for name in inner if is_module(name)]
            yield from submodules
            if len(submodules) < len(inner):
                yield node.module


@cache
def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def within(imported: list[str]) -> Iterator[str]:
    """The modules of retrain among those imported, without `retrain.`."""
    for name in imported:
        if name.startswith("retrain."):
            yield name.removeprefix("retrain.")


def room(module: str) -> str:
    """A folder or a file at the top of the package; every `__main__` is the command line."""
    return "__main__" if module.endswith("__main__") else module.partition(".")[0]


def row(module: str) -> int:
    for number, names in enumerate(ROOMS):
        if room(module) in names:
            return number
    raise AssertionError(f"retrain.{module} is in no room: add {room(module)} to ROOMS")


def test_imports_point_down() -> None:
    wrong = [
        f"retrain.{name} imports retrain.{imported}"
        for name, names in modules().items()
        for imported in within(names)
        if room(imported) != room(name) and row(imported) >= row(name)
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: set(within(names)) for name, names in modules().items()}
    with pytest.raises(CycleError):  # the check itself finds circles
        TopologicalSorter({**graph, "types": {"run"}}).prepare()
    TopologicalSorter(graph).prepare()


def test_the_pipe_knows_adapters_by_their_base_class() -> None:
    wrong = [
        f"retrain.{name} imports retrain.{imported}"
        for name, names in modules().items()
        if room(name) in ("assembly", "pipeline")
        for imported in within(names)
        if room(imported) in ("adapters", "engine", "vllm", "service")
        and imported != "adapters.base"
    ]
    assert not wrong


@pytest.mark.parametrize("library", sorted(ALLOWED))
def test_heavy_libraries_are_named_only_in_their_rooms(library: str) -> None:
    wrong = [
        name
        for name, names in modules().items()
        if any(imported.partition(".")[0] == library for imported in names)
        if not any(f"{name}.".startswith(f"{room}.") for room in ALLOWED[library])
    ]
    assert not wrong


def test_nothing_imports_the_batteries() -> None:
    wrong = [
        f"retrain.{name} imports {imported}"
        for name, names in modules().items()
        for imported in names
        if imported.partition(".")[0] in ("environments", "rewards")
    ]
    assert not wrong


def test_the_batteries_use_public_names_alone() -> None:
    for folder in ("environments", "rewards"):
        for path in sorted((ROOT.parent / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retrain"):
                    assert node.module == "retrain", f"{path} imports from {node.module}"
                    assert {alias.name for alias in node.names} <= set(retrain.__all__)


HEAVY = ("torch", "trl", "transformers", "httpx", "aiohttp")
LIGHT = {
    "import retrain": (*HEAVY, "pydantic", "yaml", "rich", "asyncio"),
    """
from retrain.adapters.trl.options import TrlOptions
TrlOptions(args={"optim": "sgd"}).capabilities()""": HEAVY,
    "import retrain.adapters.tinker.options": HEAVY,
    "import retrain.adapters.weaver.adapter": ("torch", "transformers", "httpx"),
    """
from retrain.trainer.nexrl import RemoteApiGrpoTrainer
RemoteApiGrpoTrainer({"train_service": {"backend": "tinker"}})""": ("torch",),
}
"""Code, and what it may not load; each piece runs after those before it."""


def test_what_needs_no_heavy_library_loads_none() -> None:
    script = f"""
import sys
for code, heavy in {LIGHT}.items():
    exec(code)
    if loaded := [name for name in heavy if name in sys.modules]:
        sys.exit(f"{{code}} loads {{loaded}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_loads_and_is_listed() -> None:
    for name in retrain.__all__:
        assert getattr(retrain, name) is not None
        assert name in dir(retrain)
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = retrain.nonsense  # type: ignore[attr-defined]
