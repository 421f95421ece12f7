"""Which model `model:` names: the built-in one, a local folder, or an id on the Hub."""

from __future__ import annotations

from pathlib import Path

from retrain.config.paths import places
from retrain.errors import ConfigError, NotFoundError

TINY = "tiny"
_EXPECTED = (
    f"expected {TINY}, a Hugging Face model folder (config.json, *.safetensors, tokenizer.json) as "
    "save_pretrained writes it, or a Hugging Face id such as Qwen/Qwen3-0.6B"
)


def find_model(model: str, base_dir: Path) -> str:
    """`model` as the backends take it: a folder's absolute path, or the name as it stands.

    A folder is looked up in the config's folder, then in the working folder. Raises ConfigError
    for what can only be a folder and isn't one, and for a folder that holds no model.
    """
    if not model.strip():
        raise ConfigError(f"model: got {model!r}, {_EXPECTED}")
    if model == TINY:
        return model
    tried = places(model, base_dir)
    for folder in tried:
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    for folder in tried:
        if folder.exists() and (_is_path(model) or "/" not in model):
            raise ConfigError(f"model: {folder} {_instead(folder)}")
    if _is_path(model):
        raise NotFoundError(
            f"model: there is no folder {' nor '.join(map(str, tried))}; {_EXPECTED}"
        )
    return model


def _instead(path: Path) -> str:
    """What `path` is, which holds no model, and what to do."""
    if (path / "adapter_config.json").is_file():
        return (
            "holds LoRA weights alone, and a run begins with a whole model: run the one that wrote "
            "them with checkpoint.merge_lora=true (--resume will do), and take its final/"
        )
    what = "holds no model: it has no config.json" if path.is_dir() else "is a file"
    return f"{what}; {_EXPECTED}"


def _is_path(model: str) -> bool:
    """Whether `model` can't be an id on the Hub, which is `name` or `owner/name`."""
    named = model.startswith(("/", "./", "../", "~")) or model.endswith("/")
    return named or model.count("/") > 1 or "\\" in model
