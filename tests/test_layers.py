"""Imports point down, and the heavy libraries stay where they belong: read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrain

ROOT = Path(retrain.__file__).parent
LAYERS = [
    names.split()
    for names in (
        """types errors deadlines threads config config_errors config_keys config_yaml models
        places plugin_keys plugins streams""",
        """environment rewarding prompts prompt_files sampler chat chat_template chat_tokens
        chat_tools examples algorithms adapters.base""",
        """rollout playback batching ledger checkpoint intake learning_signal metering slots
        watchdog observe.journal""",
        "compatibility assembly running saving evaluation pipeline observe",
        "engine",
        "adapters service",
        "trainer",
        "run check schema __main__ trainer.nexrl.__main__",
    )
]
"""Lowest first; a module may import from its own layer and those below."""
ALLOWED = {
    "torch": ("engine", "adapters.trl", "service", "trainer.nexrl"),
    "trl": ("adapters.trl",),
    "peft": ("engine", "adapters.trl", "service"),
    "httpx": ("adapters.tinker", "adapters.weaver", "adapters.remote"),
    "aiohttp": ("adapters.remote.exchange",),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each imported module, and whether it is for type checkers alone."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            assert node.module
            yield node.module, id(node) in typing_only
            if node.module == "retrain" or node.module.startswith("retrain."):
                for alias in node.names:
                    if (
                        (ROOT.parent / Path(*f"{node.module}.{alias.name}".split(".")))
                        .with_suffix(".py")
                        .exists()
                    ):
                        yield f"{node.module}.{alias.name}", id(node) in typing_only


def layer(module: str) -> int:
    """The layer of a module: that of its longest named prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"retrain.{module} has no layer: add it to LAYERS in {__file__}")


def test_imports_point_down() -> None:
    wrong = [
        f"retrain.{name} imports {imported}"
        for name, tree in modules()
        for imported, typing_only in imports(tree)
        if imported.startswith("retrain.") and not typing_only
        if layer(imported.removeprefix("retrain.")) > layer(name)
    ]
    assert not wrong


@pytest.mark.parametrize("library", sorted(ALLOWED))
def test_heavy_libraries_are_named_only_in_their_rooms(library: str) -> None:
    wrong = [
        name
        for name, tree in modules()
        if any(imported.partition(".")[0] == library for imported, _ in imports(tree))
        if not any(f"{name}.".startswith(f"{room}.") for room in ALLOWED[library])
    ]
    assert not wrong


def test_nothing_imports_the_batteries() -> None:
    wrong = [
        f"retrain.{name} imports {imported}"
        for name, tree in modules()
        for imported, _ in imports(tree)
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


def test_import_retrain_loads_nothing_heavy() -> None:
    heavy = "torch", "trl", "transformers", "pydantic", "yaml", "rich", "asyncio", "httpx"
    script = f"import retrain, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_loads_and_is_listed() -> None:
    for name in retrain.__all__:
        assert getattr(retrain, name) is not None
        assert name in dir(retrain)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = retrain.nonsense  # type: ignore[attr-defined]


def test_type_checkers_see_exactly_the_public_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == set(retrain.__all__) - {"__version__"}
