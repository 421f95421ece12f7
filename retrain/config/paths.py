"""Where the paths of a config lead: to the config's folder first, then to the working folder."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from retrain.errors import ConfigError, NotFoundError, first_of

TINY = "tiny"
_MODEL = (
    f"expected {TINY}, a Hugging Face model folder (config.json, *.safetensors, tokenizer.json) as "
    "written by save_pretrained, or a Hugging Face id such as Qwen/Qwen3-0.6B"
)


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
    for folder in tried:
        if folder.exists() and (_is_path(model) or "/" not in model):
            raise ConfigError(f"model: {folder} {_no_model(folder)}")
    if "/" not in model and difflib.get_close_matches(model.lower(), [TINY], cutoff=0.7):
        raise ConfigError(f"model: got {model!r}, no folder of this name; did you mean {TINY}?")
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
        if path.parent.is_dir():
            names = [entry.name for entry in path.parent.iterdir()]
            if near := difflib.get_close_matches(path.name, names, n=1):
                return f"; did you mean {near[0]}?"
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
