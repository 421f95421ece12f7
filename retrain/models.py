"""Which model `model:` names: the built-in one, a local folder, or an id on the Hub."""

from __future__ import annotations

from pathlib import Path

from retrain.errors import ConfigError

TINY = "tiny"


def find_model(model: str, base_dir: Path) -> str:
    """`model` as the backends take it: a folder's absolute path, or the name as it stands.

    A folder is looked up in the config's folder, then in the working folder. Raises ConfigError
    for what can only be a folder and isn't one, and for a folder that holds no model.
    """
    if not model.strip():
        raise ConfigError(f"model: got {model!r}, expected tiny, a folder or a Hugging Face id")
    if model == TINY:
        return model
    tried = dict.fromkeys(base / Path(model).expanduser() for base in (base_dir, Path.cwd()))
    for folder in tried:
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    for folder in tried:
        if folder.is_dir() and (_is_path(model) or "/" not in model):
            raise ConfigError(f"model: {folder} holds no model: it has no config.json")
    if _is_path(model):
        raise ConfigError(f"model: there is no folder {' nor '.join(map(str, tried))}")
    return model


def _is_path(model: str) -> bool:
    """Whether `model` can't be an id on the Hub, which is `name` or `owner/name`."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or "\\" in model
