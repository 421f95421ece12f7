"""Where the paths of a config lead: to the config's folder first, then to the working folder."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from retrain.errors import ConfigError, NotFoundError, first_of, nearest

TINY = "tiny"
_MODEL = (
    f"expected {TINY}, a Hugging Face model folder (config.json, *.safetensors, tokenizer.json) as "
    "written by save_pretrained, or a Hugging Face id such as Qwen/Qwen3-0.6B"
)
_INTERPRETER = re.compile(r"(python[\d.]*|node|ruby|perl|(ba|z|da)?sh)$")
CODE_OPTIONS = ("-c", "-m", "-e", "-p", "--eval", "--print")
"""Options of interpreters that stand for the file of a program."""
_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh", ".rb", ".pl")


def places(text: str, base_dir: Path | None) -> list[Path]:
    """The paths that `text` may mean, without duplicates; `~` is the home folder.

    `~name` is an ordinary path if there is no user of that name.
    """
    path = os.path.expanduser(text)  # Path.expanduser raises for an unknown user
    return list(dict.fromkeys(folder / path for folder in (base_dir or Path(), Path.cwd())))


def find_file(
    text: str, base_dir: Path | None, where: str = "", error: type[ConfigError] = ConfigError
) -> Path:
    """The first file of `places`. Raises `error`, headed by `where`, if there is none."""
    tried = places(text, base_dir)
    for path in tried:
        if path.is_file():
            return path
    for path in tried:
        if path.is_dir():
            raise error(f"{where}{path} is a folder, expected a file")
        if broken := broken_link(path):
            raise error(f"{where}{broken}")
    raise error(f"{where}file not found: {' or '.join(map(str, tried))}{_similar(tried)}")


def find_command(
    command: Sequence[str], base_dir: Path, where: str, written: Collection[str] = ()
) -> list[str]:
    """A command whose program and files are absolute paths, so that it runs in any folder.

    A relative path is resolved in the config's folder, then in the working folder; `python` is the
    interpreter of the run. A program with a {name} is filled in later, and the files `written` do
    not exist yet. Raises ConfigError, headed by `where`, if there is no such program, or its
    interpreter has no such file.
    """
    if not command:
        raise ConfigError(f"{where}: got an empty list, expected a program")
    tried = [places(part, base_dir) if part else [] for part in command]
    parts = [
        next((str(path.absolute()) for path in paths if path.is_file()), part)
        for part, paths in zip(command, tried, strict=True)
    ]
    search = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    program = shutil.which(parts[0], path=search)
    if program is None and "{" not in parts[0]:
        raise ConfigError(
            f"{where}: there is no program {parts[0]!r}. Install it, or give its path."
        )
    script = _script(command)
    if script and script not in written and not Path(parts[command.index(script, 1)]).is_file():
        looked = " or ".join(map(str, places(script, base_dir)))
        raise ConfigError(f"{where}: file not found: {looked}")
    return [program or parts[0], *parts[1:]]


def _script(command: Sequence[str]) -> str:
    """The file that an interpreter is to execute; empty if none is certain."""
    named = next((part for part in command[1:] if not part.startswith("-")), "")
    if not _INTERPRETER.match(Path(command[0]).name) or "{" in named:
        return ""
    options = command[1 : command.index(named, 1)] if named else ()
    certain = not options or named.endswith(_SCRIPTS)
    return named if certain and not set(CODE_OPTIONS).intersection(options) else ""


def find_model(model: str, base_dir: Path) -> str:
    """`model` for a backend: the absolute path of a model folder, `tiny`, or an id on the Hub.

    Raises NotFoundError for a path that does not exist, ConfigError for a folder without a model.
    """
    if not model.strip():
        raise ConfigError(f"model: got {model!r}, {_MODEL}")
    if model == TINY:
        return model
    tried = places(model, base_dir)
    for folder in tried:
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    may_be_id = "/" in model and not _is_path(model)
    for folder in tried:
        if folder.exists() and not may_be_id:
            raise ConfigError(f"model: {folder} {_no_model(folder)}")
    if "/" not in model and difflib.get_close_matches(model.lower(), [TINY], cutoff=0.7):
        raise ConfigError(
            f"model: got {model!r}, but there is no folder of this name; did you mean {TINY}?"
        )
    if _is_path(model):
        raise NotFoundError(f"model: folder not found: {' or '.join(map(str, tried))}; {_MODEL}")
    return model


def is_hub_id(model: str, base_dir: Path) -> bool:
    """Whether a model that `find_model` accepts is read from the Hub or its cache."""
    return model != TINY and find_model(model, base_dir) == model and not Path(model).is_absolute()


def broken_link(path: Path) -> str:
    """What is wrong with a symbolic link whose target is missing; empty for any other path."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path} is a link to {os.readlink(path)}, which does not exist"


def neighbours(path: Path) -> str:
    """For a message: the YAML files beside `path`, or in it if it is a folder."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder} either)"
    near = sorted(file.name for file in folder.glob("*.y*ml"))
    return f"; the folder contains {first_of(near)}" if near else ""


def _similar(tried: list[Path]) -> str:
    for path in tried:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        if near := nearest(path.name, (entry.name for entry in beside)):
            return near
    return ""


def _no_model(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return (
            "contains only LoRA weights, but a run starts from a complete model: repeat the run "
            "that wrote them with checkpoint.merge_lora=true (--resume is enough), and use its "
            "final/"
        )
    what = "contains no model: config.json is missing" if path.is_dir() else "is a file"
    return f"{what}; {_MODEL}"


def _is_path(model: str) -> bool:
    """Whether `model` can't be an id on the Hub, which is `name` or `owner/name`."""
    named = model.startswith(("/", "./", "../", "~")) or model.endswith("/")
    return named or model.count("/") > 1 or "\\" in model
