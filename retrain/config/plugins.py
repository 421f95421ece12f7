"""From `type` and its keys to an object: "name" | "module:Class" | "path/file.py:Class".

- A short name is a built-in. The batteries in `environments/` and `rewards/` load by file path
  from beside this package, so that a user's own package of that name can't hide one.
- A file path is looked up in the config's folder, then in the working folder, and its folder is
  its package: relative imports inside it work, and a file is executed once.
- The constructor's signature is the schema of the keys: `bind` checks names and simple types.

A user's mistake is a PluginError that names the file and the line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.config.paths import places
from retrain.errors import PluginError

HOME = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package, `environments/` and `rewards/`."""

BUILT_IN: dict[str, dict[str, str]] = {
    "environment": {"single_turn": "retrain.environment:Environment"},
    "reward": {},
    "algorithm": {
        "dpo": "retrain.algorithms.dpo:DPO",
        "grpo": "retrain.algorithms.grpo:GRPO",
        "reinforce": "retrain.algorithms.reinforce:Reinforce",
        "rloo": "retrain.algorithms.rloo:RLOO",
        "sft": "retrain.algorithms.sft:SFT",
    },
    "prompts": {
        "file": "retrain.prompts.sources:FilePrompts",
        "hf": "retrain.prompts.sources:DatasetPrompts",
        "list": "retrain.prompts.sources:ListPrompts",
    },
    "backend": {
        "tinker": "retrain.adapters.tinker.options",
        "trl": "retrain.adapters.trl.options",
        "weaver": "retrain.adapters.weaver.options",
    },
    "logger": {
        "tensorboard": "retrain.observe.loggers.tensorboard:TensorBoardLogger",
        "trackio": "retrain.observe.loggers.trackio:TrackioLogger",
        "wandb": "retrain.observe.loggers.wandb:WandbLogger",
    },
}
"""Short names by kind; a module without a class stands for the only fitting one in it."""

FOLDERS = {"environment": "environments", "reward": "rewards"}
"""Kinds whose short names are also the files of a folder beside the package."""


@dataclass(frozen=True)
class Kind:
    """What a plug-in must be: a class below `base`, or whatever else `accepts` says is fit."""

    name: str
    base: type
    accepts: Callable[[Any], bool] | None = None

    def fits(self, value: Any) -> bool:
        """Whether `value` is a usable class or object of this kind."""
        if inspect.isclass(value):
            return issubclass(value, self.base) and not inspect.isabstract(value)
        return isinstance(value, self.base) or bool(self.accepts and self.accepts(value))


def find_plugin(kind: Kind, text: str, where: str, base_dir: Path) -> Any:
    """The class, function or object that the `type` at the dotted path `where` names.

    Raises PluginError when there is none, or it is of another kind.
    """
    target, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    if target.endswith(".py"):
        module = _load_file(find_file(target, where, base_dir), where)
    elif colon:
        module = _import(target, where, base_dir)
    else:
        return _built_in(kind, text, where, base_dir)
    return _pick(kind, module, name, where)


def built_in_names(kind: str) -> list[str]:
    """The short names of a kind, sorted."""
    folder = HOME / FOLDERS.get(kind, "")
    files = folder.glob("*.py") if kind in FOLDERS else ()
    return sorted({*BUILT_IN[kind], *(f.stem for f in files if not f.name.startswith("_"))})


def find_file(text: str, where: str, base_dir: Path) -> Path:
    """A path of the config: absolute, or in the config's folder, or in the working folder.

    Raises PluginError listing the places that were tried.
    """
    tried = places(text, base_dir)
    for path in tried:
        if path.exists():
            return path.resolve()
    raise PluginError(f"{where}: there is no file {' nor '.join(map(str, tried))}{_similar(tried)}")


def _built_in(kind: Kind, text: str, where: str, base_dir: Path) -> Any:
    target = BUILT_IN[kind.name].get(text)
    if target:
        module, _, name = target.partition(":")
        return _pick(kind, _import(module, where, base_dir), name, where)
    names = built_in_names(kind.name)
    if text in names:
        return _pick(kind, _load_file(HOME / FOLDERS[kind.name] / f"{text}.py", where), "", where)
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    module, _, last = text.rpartition(".")
    if module:
        hint = f"; for your own class write {module}:{last}"
    raise PluginError(
        f"{where}: there is no built-in {kind.name} {text!r}{hint} (built-in: "
        f"{', '.join(names) or 'none'}; your own: module:Class or path/file.py:Class)"
    )


def _pick(kind: Kind, module: ModuleType, name: str, where: str) -> Any:
    """The plug-in called `name`, or the only one that the module defines."""
    source = getattr(module, "__file__", None) or module.__name__
    if name:
        value = getattr(module, name, None)
        if value is None:
            raise PluginError(f"{where}: there is no {name} in {source}{_defined(kind, module)}")
        if inspect.isclass(value) and issubclass(value, kind.base) and inspect.isabstract(value):
            missing = ", ".join(sorted(vars(value)["__abstractmethods__"]))
            raise PluginError(f"{where}: {name} in {source} does not define {missing}")
        if not kind.fits(value):
            base = kind.base.__name__
            article = "an" if base[0] in "AEIOU" else "a"
            raise PluginError(
                f"{where}: {name} in {source} is not {article} {base}{_defined(kind, module)}"
            )
        return value
    found = dict(_candidates(kind, module))
    sure = {n: v for n, v in found.items() if inspect.isclass(v) or isinstance(v, kind.base)}
    found = sure or found  # a helper function beside a reward is no reward
    stem = Path(source).stem
    if stem in found:
        return found[stem]
    if len(found) != 1:
        choices = " or ".join(f"{Path(source).name}:{name}" for name in found)
        many = f"several: write {choices}" if found else "none"
        raise PluginError(f"{where}: {source} must define one {kind.base.__name__}, found {many}")
    return next(iter(found.values()))


def _candidates(kind: Kind, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The fitting public things that the module itself defines."""
    for name, value in vars(module).items():
        home = getattr(getattr(value, "function", value), "__module__", None)  # @reward keeps it
        if not name.startswith("_") and home == module.__name__ and kind.fits(value):
            yield name, value


def _defined(kind: Kind, module: ModuleType) -> str:
    names = [name for name, _ in _candidates(kind, module)]
    return f"; it has {', '.join(names)}" if names else f"; it defines no {kind.base.__name__}"


def _import(name: str, where: str, base_dir: Path) -> ModuleType:
    with _on_path(base_dir), _blamed(where, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there: something that it imports is missing
            places = " or ".join(dict.fromkeys((str(base_dir), str(Path.cwd()))))
            raise PluginError(
                f"{where}: there is no module {error.name}: it must be installed, or stand in "
                f"{places}"
            ) from None


def _load_file(path: Path, where: str) -> ModuleType:
    """Execute a file once, as a member of a package that is its folder."""
    folder = path.parent
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    package = f"_retrain_{digest}_{folder.name}"
    with _blamed(where, path.name):
        if package not in sys.modules:
            _load_package(package, folder)
        return importlib.import_module(f"{package}.{path.stem}")


def _load_package(name: str, folder: Path) -> None:
    init = folder / "__init__.py"
    if not init.exists():
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
        return
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{init} can't be loaded")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


@contextmanager
def _on_path(base_dir: Path) -> Iterator[None]:
    """The config's folder and the working folder stay on the path: plug-ins import lazily too."""
    for folder in (str(Path.cwd()), str(base_dir)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    yield


@contextmanager
def _blamed(where: str, what: str) -> Iterator[None]:
    """Turn what a user's module raises on import into a PluginError with its file and line."""
    try:
        yield
    except PluginError as error:
        if str(error).startswith(f"{where}: "):
            raise
        raise PluginError(f"{where}: {what}: {error}") from error  # a decorator's, in the module
    except SyntaxError as error:
        raise PluginError(
            f"{where}: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{where}: importing {what} failed{line_of(error)}: {type(error).__name__}: {error}"
        ) from error


def line_of(error: BaseException) -> str:
    """ " at file:line" of the last frame outside the import machinery."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith("<frozen") and frame.filename != __file__:
            return f" at {frame.filename}:{frame.lineno}"
    return ""


def _similar(tried: list[Path]) -> str:
    for path in tried:
        if path.parent.is_dir():
            names = [entry.name for entry in path.parent.iterdir()]
            near = difflib.get_close_matches(path.name, names, n=1)
            if near:
                return f"; did you mean {near[0]}?"
    return ""
