"""From the config's `model` to weights and a tokenizer.

`resolve_model` and `load_tokenizer` import no torch. Whatever is wrong with the user's `model` is
a ConfigError that says what was looked for and where.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config.paths import TINY, find_model
from retrain.engine.tiny import quiet, tiny_folder, tiny_tokenizer
from retrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROCESS_STATE = threading.RLock()
"""Held by a thread that loads or trains with transformers, accelerate and TRL: how weights are
initialised, gradient synchronisation and the random generator are the whole process's."""


def resolve_model(model: str, base_dir: Path) -> str:
    """What transformers can load: `find_model`'s answer, with the folder of the built-in model."""
    found = find_model(model, base_dir)
    return str(tiny_folder()) if found == TINY else found


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The causal LM in `folder` (or of a Hub id), in evaluation mode; `dtype` None is float32.

    Raises ConfigError when it can't be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with PROCESS_STATE, quiet():
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
