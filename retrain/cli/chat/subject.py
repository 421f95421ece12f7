"""What `RUN_DIR|MODEL` names: the weights to load, and how their run rendered and sampled.

Nothing here loads a model, so that a user's mistake is found at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from retrain.assembly import chat_template, tool_format
from retrain.chat.formats.base import Format
from retrain.config import ChatConfig, RunConfig, SamplingConfig, load_config
from retrain.config.paths import find_model
from retrain.errors import CheckpointError, ConfigError, NotFoundError, first_of
from retrain.observe.run_dir import CONFIG
from retrain.pipeline.checkpoint import Checkpoint, Checkpoints, verified

FINAL, ADAPTER = "final", "adapter_config.json"
_EXPECTED = (
    "expected a run directory, its checkpoints/step_N, tiny, a model folder or a Hugging Face id"
)


@dataclass(frozen=True)
class LoadableModel:
    """A model that can be loaded."""

    name: str
    model: str
    """`tiny`, a folder, or an id on the Hub."""
    adapter: Path | None = None
    """A folder with LoRA weights for it."""
    template: str = "auto"
    """`auto`, `none`, or the source of a chat template."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: Format | None = None
    """The format of tool calls; None if it is to be inferred."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    base: LoadableModel | None = None
    """What it was trained from."""


def find_subject(text: str) -> LoadableModel:
    """The model that a command names; raises ConfigError if there is none that can be loaded."""
    folder = Path(text).expanduser()
    if (folder / CONFIG).is_file():
        return _of_run(folder)
    if folder.name == FINAL and (folder.parent / CONFIG).is_file():
        return _of_run(folder.parent)
    run = folder.parent.parent
    if folder.parent.name == "checkpoints" and folder.is_dir() and (run / CONFIG).is_file():
        return _of_run(run, folder)
    if (folder / ADAPTER).is_file():
        base = LoadableModel(_base_of(folder), _base_of(folder))
        return replace(base, name=text, adapter=folder, base=base)
    if not (folder / "config.json").is_file() and (folder.exists() or _is_missing(folder)):
        raise NotFoundError(f"{_problem(folder)}; {_EXPECTED}")
    return LoadableModel(text, find_model(text, Path()))


def _of_run(folder: Path, checkpoint: Path | None = None) -> LoadableModel:
    """A checkpoint of a run; by default its exported model, or its newest checkpoint."""
    config = load_config(folder / CONFIG, fill=False)  # a secret of the run is not needed
    base = LoadableModel(
        f"{config.model} (the base model)",
        find_model(config.model, config.base_dir),
        template=chat_template(config),
        chat=config.chat,
        tools=tool_format(config),
        sampling=config.sampling,
    )
    weights = _trained(folder, config, checkpoint)
    if (weights / ADAPTER).is_file():
        return replace(base, name=str(weights), adapter=weights, base=base)
    return replace(base, name=str(weights), model=str(weights.resolve()), base=base)


def _trained(folder: Path, config: RunConfig, path: Path | None) -> Path:
    """The folder with the weights of a run, or of its checkpoint at `path`."""
    if path is None and _has_weights(folder / FINAL):
        return folder / FINAL
    if config.backend.type in ("tinker", "weaver"):
        raise ConfigError(
            f"{folder}: the backend {config.backend.type} keeps the trained weights on its service;"
            " sample them with a client of the service"
        )
    path, checkpoint = _newest(folder) if path is None else (path, _read(path))
    weights = path / "adapter" / str(checkpoint.adapter.get("checkpoint", ""))
    if not _has_weights(weights):
        raise ConfigError(
            f"{path} has no weights that can be loaded outside of its run, such as those of a "
            f"sharded model; end the run with --resume, which writes {FINAL}/"
        )
    return weights


def _newest(folder: Path) -> tuple[Path, Checkpoint]:
    checkpoints = Checkpoints(folder / "checkpoints")
    found = checkpoints.newest()
    checkpoints.close()
    if found is None:
        why = f" ({first_of(checkpoints.incomplete)})" if checkpoints.incomplete else ""
        raise ConfigError(
            f"{folder} has neither an exported model ({FINAL}/) nor a complete checkpoint{why}; "
            "wait for its first checkpoint, or continue it with --resume"
        )
    return found


def _read(path: Path) -> Checkpoint:
    try:
        return verified(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _has_weights(folder: Path) -> bool:
    known = (folder / "config.json").is_file() or (folder / ADAPTER).is_file()
    return known and any(folder.glob("*.safetensors"))


def _base_of(folder: Path) -> str:
    """The model that LoRA weights belong to."""
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{folder / ADAPTER} does not name its base model; pass the run directory instead"
        )
    return find_model(base, Path())


def _is_missing(folder: Path) -> bool:
    """Whether a path without a folder can't be the id of a model on the Hub."""
    parent = folder.parent
    return folder.is_absolute() or (str(parent) != "." and parent.is_dir())


def _problem(folder: Path) -> str:
    if folder.is_dir():
        return f"{folder} has neither the {CONFIG} of a run nor the config.json of a model"
    near = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
    beside = f" ({folder.parent} contains {first_of(near)})" if near else ""
    return f"there is no folder {folder}{beside}"
