"""From the config's `model` to weights and a tokenizer.

`resolve_model` and `load_tokenizer` import no torch. Whatever is wrong with the user's `model` is
a ConfigError that says what was looked for and where.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from retrain.engine.tiny import quiet, tiny_folder, tiny_tokenizer
from retrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny"


def resolve_model(model: str, base_dir: Path) -> str:
    """What transformers can load: an absolute folder, or a Hub id as it was given.

    A relative path is looked up in `base_dir`, then in the working folder. Raises ConfigError when
    a path leads nowhere, or to a folder that holds no model.
    """
    if model == TINY:
        return str(tiny_folder())
    path = Path(model).expanduser()
    candidates = list(dict.fromkeys((base / path).resolve() for base in (base_dir, Path())))
    found = next((folder for folder in candidates if folder.exists()), None)
    if found is None:
        if _is_hub_id(model):
            return model
        looked = " or ".join(map(str, candidates))
        raise ConfigError(
            f"model: {model!r} is not there: looked for {looked}. "
            f"Give a model folder, a Hugging Face id such as Qwen/Qwen3-0.6B, or {TINY!r}"
        )
    if not (found / "config.json").is_file():
        what = "a folder without config.json" if found.is_dir() else "a file"
        raise ConfigError(
            f"model: {found} is {what}; expected a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json), as save_pretrained writes it"
        )
    return str(found)


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The causal LM in `folder` (or of a Hub id), in evaluation mode; `dtype` None is float32.

    Raises ConfigError when it can't be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or torch.float32
            )
    except (OSError, ValueError) as error:
        raise _cannot_load("model", folder, error) from error
    model.to(device)  # type: ignore[arg-type]  # a string will do
    model.train(False)
    return model


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder` (or of a Hub id, or `tiny`), from its tokenizer.json.

    AutoTokenizer, which imports torch, is the way out where there is no tokenizer.json. Raises
    ConfigError when none can be loaded.
    """
    if folder == TINY:
        return tiny_tokenizer()
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    try:
        if not Path(folder).is_dir():
            cached_file(str(folder), "config.json")  # its error says why; the tokenizer's doesn't
        elif not (Path(folder) / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            converted: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
            return converted
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", folder, error) from error


def choose_device() -> str:
    """`cuda` when this machine has one, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_hub_id(model: str) -> bool:
    """`name` or `owner/name`: anything else can only be meant as a path."""
    parts = model.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def _cannot_load(what: str, folder: str | Path, error: Exception) -> ConfigError:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    if Path(folder).is_dir():
        advice = "It must be a Hugging Face causal LM's folder, as save_pretrained writes it"
    else:
        advice = (
            "No folder of that name was found, so it was taken for a Hugging Face id: correct the "
            f"path or the id, or fetch it where there is a network with `hf download {folder}`"
        )
    return ConfigError(f"model: the {what} of {str(folder)!r} can't be loaded: {reason}. {advice}")
