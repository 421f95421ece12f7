"""What `type` names: "name" | "module:Class" | "path/file.py:Class".

- A short name is a file: retrain/algorithms/NAME.py, retrain/adapters/NAME/options.py,
  environments/NAME.py, ... A new file is a new name; there is no list to update.
- The built-in `environments/`, `rewards/` and `configs/` are beside the package in a checkout, and
  inside it in an installation. A user's own `environments/` and `rewards/`, in the config's or the
  working folder, add names; a built-in of the same name takes precedence.
- A file path is resolved in the config's folder, then in the working folder. Its folder is its
  package: relative imports work, and a file is executed once.
- A plug-in of the user's can import from the config's folder and the working folder, which come
  before installed packages, and from its own folder, which comes after them: `rewards/regex.py`
  must not replace a package that a library imports. It doesn't matter what is loaded first.

A user's mistake is a PluginError with the file and the line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from retrain.config.paths import find_file
from retrain.errors import ConfigError, PluginError, PromptError, is_library, nearest
from retrain.supervision.jsonable import Named

T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parent.parent
FILES = {
    "algorithm": "algorithms/*.py",
    "backend": "adapters/*/options.py",
    "config": "configs/*.yaml",
    "environment": "environments/*.py",
    "logger": "observe/loggers/*.py",
    "prompts": "prompts/sources/*.py",
    "reward": "rewards/*.py",
    "tool format": "chat/formats/*.py",
}
"""The files of each kind; what `*` stands for is the short name."""
OWN = ("environment", "reward")
"""Kinds that a user's own folder adds names to."""
LOCAL = re.compile(r"^__main__:|<|:.*\.")
"""Names of objects that no import finds."""
_PREFIX = "_retrain_"
"""What the names of the packages begin with that are made of users' folders."""
SHARED = frozenset({"base", "batching", "credit", "functional", "remote"})
"""Code that the built-ins of the other kinds share: not a plug-in, like `_name`."""


@dataclass(frozen=True)
class Kind:
    """What a plug-in must be: a subclass or instance of `base`, or a value that `accepts` takes."""

    name: str
    base: type
    accepts: Callable[[Any], bool] | None = None

    def fits(self, value: Any) -> bool:
        """Whether `value` is a usable class or object of this kind."""
        if inspect.isclass(value):
            return issubclass(value, self.base) and not inspect.isabstract(value)
        if value is None:
            return False
        return isinstance(value, self.base) or bool(self.accepts and self.accepts(value))


def named(value: Any, taken: dict[str, Any]) -> Any:
    """`value` with a name in place of each class and function: `module:name`.

    The same objects in the same places get the same names, so that a resume finds them. `taken`
    holds the names so far, by which several lambdas differ.
    """
    if isinstance(value, Mapping):
        return {key: named(inner, taken) for key, inner in value.items()}
    if isinstance(value, list):
        return [named(inner, taken) for inner in value]
    if not callable(value):
        return value
    owner = value if hasattr(value, "__qualname__") else type(value)
    text = name = f"{owner.__module__}:{owner.__qualname__}"
    module = sys.modules.get(owner.__module__)
    if LOCAL.search(text) or getattr(module, owner.__qualname__, None) is not value:
        number = 1
        while taken.setdefault(text, value) is not value:
            number += 1
            text = f"{name}#{number}"
    found = Named(text)
    found.value = value
    return found


def with_objects(value: Any) -> Any:
    """The arguments of a plug-in with the objects that are named."""
    if isinstance(value, dict):
        return {key: with_objects(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_objects(inner) for inner in value]
    return value.value if isinstance(value, Named) else value


class Function:
    """What no class derives from, so that only callables fit."""


_FUNCTION = Kind("function", Function, callable)
_OBJECT = Kind("object", object)


def find_plugin(kind: Kind, text: str, where: str, base_dir: Path) -> Any:
    """The class, function or object that `type: text` at the dotted path `where` names.

    Raises PluginError if there is none, or it is of another kind.
    """
    target, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    if isinstance(text, Named):
        return _fitting(kind, text.value, text, where)
    if target.endswith(".py"):
        path = find_file(target, base_dir, f"{where}: ", PluginError)
        module = _load_own(path, where, base_dir)
    elif colon and LOCAL.search(text) and not hasattr(sys.modules.get(target), name):
        raise PluginError(
            f"{where}: {text} is an object of the Python program that started the run; start it "
            "from Python with that object, or move the object into a module"
        )
    elif colon:
        module = _import(target, where, base_dir)
    else:
        path = _named(kind.name, text, where, base_dir)
        ours = path in built_ins(kind.name).values()
        module = _load_file(path, where) if ours else _load_own(path, where, base_dir)
    return _member(kind, module, name, where) if name else _only(kind, module, where)


def _fitting(kind: Kind, value: Any, what: str, where: str, advice: str = "") -> Any:
    """The value; raises PluginError if it is of another kind."""
    if kind.fits(value):
        return value
    raise PluginError(f"{where}: {what} is not a subclass of {kind.base.__name__}{advice}")


def find_function(text: str, base_dir: Path, where: str) -> Callable[..., Any]:
    """The function that `module:name` or `path/file.py:name` names; raises PluginError."""
    function: Callable[..., Any] = find_plugin(_FUNCTION, text, where, base_dir)
    return function


def find_object(text: str, base_dir: Path, where: str) -> Any:
    """What `module:name` or `path/file.py:name` names, such as a class; raises PluginError."""
    return find_plugin(_OBJECT, text, where, base_dir)


def built_in_names(kind: str) -> list[str]:
    """The built-in short names of a kind, sorted; imports nothing."""
    return sorted(built_ins(kind))


def built_ins(kind: str) -> dict[str, Path]:
    """The built-in files of a kind by their short names: in the package, or in its checkout."""
    return _files(kind, PACKAGE if any(PACKAGE.glob(FILES[kind])) else PACKAGE.parent)


def config_file(text: str) -> Path:
    """The file of a command's CONFIG: a path, or the name of an included config."""
    return Path(text) if Path(text).exists() else built_ins("config").get(text, Path(text))


def _files(kind: str, root: Path) -> dict[str, Path]:
    """The files of a kind below `root`, by their short names."""
    by_folder = "/*/" in FILES[kind]
    files = {f.parent.name if by_folder else f.stem: f for f in root.glob(FILES[kind])}
    shared = () if kind in OWN else SHARED
    return {name: files[name] for name in files if name[0] != "_" and name not in shared}


def _named(kind: str, name: str, where: str, base_dir: Path) -> Path:
    """The file of a short name; a built-in comes before one of the user's."""
    found = [built_ins(kind)] if kind in FILES else []
    found += [_files(kind, root) for root in (base_dir, Path.cwd()) if kind in OWN]
    for files in found:
        if name in files:
            return files[name]
    names = sorted(set().union(*found))
    module, _, last = name.rpartition(".")
    own = f"; for your own class, write {module}:{last}"
    hint = own if module else nearest(name, names)
    if not names:
        raise PluginError(
            f"{where}: there is no {kind} {name!r}; write module:name or path/file.py:name"
        )
    raise PluginError(
        f"{where}: there is no {kind} {name!r}{hint} (available: {', '.join(names)}; "
        "your own: module:Class or path/file.py:Class)"
    )


def _member(kind: Kind, module: ModuleType, name: str, where: str) -> Any:
    """The plug-in called `name` in the module."""
    source, base = _source(module), kind.base
    value = getattr(module, name, None)
    if kind.fits(value):
        return value
    if inspect.isclass(value) and issubclass(value, base):
        missing = ", ".join(sorted(vars(value)["__abstractmethods__"]))
        raise PluginError(f"{where}: {name} in {source} does not define {missing}")
    names = ", ".join(_candidates(kind, module))
    others = f"it defines {names}" if names else f"it defines no {base.__name__}"
    if value is None:
        public = [known for known in dir(module) if known[0] != "_"]
        hint = nearest(name, public) or f"; {others}"
        raise PluginError(f"{where}: there is no {name} in {source}{hint}")
    return _fitting(kind, value, f"{name} in {source}", where, f"; {others}")


def _only(kind: Kind, module: ModuleType, where: str) -> Any:
    """The single plug-in of the module, or the one that has the file's name."""
    found = _candidates(kind, module)
    sure = {n: v for n, v in found.items() if inspect.isclass(v) or isinstance(v, kind.base)}
    found = sure or found  # a helper function beside a reward is not a reward
    source = Path(_source(module))
    if source.stem in found:
        return found[source.stem]
    if len(found) != 1:
        choices = " or ".join(f"{source.name}:{name}" for name in found)
        many = f"several: write {choices}" if found else "none"
        raise PluginError(f"{where}: {source} must define one {kind.base.__name__}, found {many}")
    return next(iter(found.values()))


def _source(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _candidates(kind: Kind, module: ModuleType) -> dict[str, Any]:
    """The public plug-ins that the module itself defines, by name."""
    found = {name: v for name, v in vars(module).items() if name[0] != "_" and kind.fits(v)}
    own = {n: getattr(v, "function", v) for n, v in found.items()}  # @reward keeps the function
    return {n: found[n] for n in own if getattr(own[n], "__module__", None) == module.__name__}


def _search(base_dir: Path, *own: Path) -> list[str]:
    """Make these folders importable; returns those that come first.

    They stay on the path, since plug-ins import lazily too.
    """
    first = list(dict.fromkeys(str(folder.resolve()) for folder in (base_dir, Path.cwd())))
    sys.path[:0] = [folder for folder in first if folder not in sys.path]
    sys.path += [str(f) for f in map(Path.resolve, own) if str(f) not in sys.path]
    importlib.invalidate_caches()
    return first


def _import(name: str, where: str, base_dir: Path) -> ModuleType:
    folders = _search(base_dir)
    with _blamed(where, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one that it imports does not
            raise PluginError(
                f"{where}: there is no module {error.name}: install it, or put it into "
                f"{' or '.join(folders)}"
            ) from None


def _load_own(path: Path, where: str, base_dir: Path) -> ModuleType:
    """Import a file of the user's, which may import its neighbours."""
    _search(base_dir, path.parent)
    return _load_file(path, where)


def _load_file(path: Path, where: str) -> ModuleType:
    """Import a file once: by its own name inside the package, else as a member of its folder."""
    path = path.resolve()
    if path.is_relative_to(PACKAGE):
        with _blamed(where, path.name):
            return importlib.import_module(
                ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts))
            )
    folder = path.parent
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    package = f"{_PREFIX}{digest}_{folder.name}"
    with _blamed(where, path.name):
        if package not in sys.modules:
            _load_package(package, folder)
        return importlib.import_module(f"{package}.{path.stem}")


def _load_package(name: str, folder: Path) -> None:
    """Make `folder` a package; if it has an `__init__.py`, execute that."""
    init, search = folder / "__init__.py", [str(folder)]
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=search)
    if not init.exists() or spec is None or spec.loader is None:
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = search
        return
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with ExitStack() as failed:
        failed.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        failed.pop_all()


def user_packages() -> dict[str, str]:
    """The packages made of users' folders, and their folders: for another process."""
    packages = {name: m for name, m in sys.modules.items() if name.startswith(_PREFIX)}
    return {name: m.__path__[0] for name, m in packages.items() if "." not in name}


def restore_package(name: str, packages: Mapping[str, str]) -> None:
    """Make the package `name` of another process's `user_packages`, if it is one."""
    if name in packages and name not in sys.modules:
        _load_package(name, Path(packages[name]))


@contextmanager
def _blamed(where: str, what: str) -> Iterator[None]:
    """Turn what a user's module raises on import into a PluginError with its file and line."""
    try:
        yield
    except PluginError as error:
        if str(error).startswith(f"{where}: "):
            raise
        raise PluginError(  # raised by a decorator
            f"{where}: importing {what} failed{line_of(error, own=True)}: {error}"
        ) from error
    except SyntaxError as error:
        raise PluginError(
            f"{where}: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{where}: importing {what} failed{line_of(error, own=True)}: {type(error).__name__}: "
            f"{error}"
        ) from error


def construct(where: str, made: Callable[[], T], plugin: Any = None) -> T:
    """Call a constructor, which may be a user's; what it raises is a problem of the config.

    `plugin` is what `made` calls, if it is not `made` itself. A ValueError of which the text
    begins with "KEY: ", where KEY is one of its arguments, is a problem of that key.
    """
    target = plugin or getattr(made, "func", made)
    try:
        return made()
    except PromptError as error:
        raise PromptError(
            *(_at_key(where, problem, target) for problem in error.problems)
        ) from error
    except ConfigError as error:
        if error.source or not all(_is_key(problem, target) for problem in error.problems):
            raise
        raise type(error)(*(f"{where}.{problem}" for problem in error.problems)) from error
    except Exception as error:
        if isinstance(error, ValueError) and _is_key(str(error), target):
            raise PluginError(f"{where}.{error}") from error
        name = getattr(target, "__name__", "the constructor")
        raise PluginError(
            f"{where}: {name}(...) raised {type(error).__name__}: {error}{line_of(error)}"
        ) from error


def _at_key(where: str, problem: str, target: Any) -> str:
    return f"{where}{'.' if _is_key(problem, target) else ': '}{problem}"


def _is_key(problem: str, target: Any) -> bool:
    """Whether a problem begins with the name of an argument and a colon."""
    key, colon, _ = problem.partition(": ")
    try:
        return bool(colon) and key in inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False


def line_of(error: BaseException, own: bool = False) -> str:
    """ " at file:line" of the last frame outside the import machinery; with `own`, of the last one
    in a file of the user's, if there is any."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    if own:
        frames = [frame for frame in frames if not is_library(frame.filename)] or frames
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
