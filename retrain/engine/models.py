"""Loads the config's `model`: weights and tokenizer.

`resolve_model` and `load_tokenizer` import no torch. If `model` can't be loaded, the ConfigError
says what was tried.
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
"""Held by a thread that loads or trains with transformers, accelerate and TRL, since their weight
initialization, gradient synchronization and random generator are global to the process."""


def resolve_model(model: str, base_dir: Path) -> str:
    """A folder or id that transformers can load; makes the folder of the built-in model."""
    found = find_model(model, base_dir)
    return str(tiny_folder()) if found == TINY else found


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The causal LM in `folder` (or of a Hub id), in evaluation mode; `dtype` None is float32.

    Raises ConfigError if it can't be loaded.
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
    model.to(device)  # type: ignore[arg-type]  # a string is valid
    model.train(False)
    return model


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder` (or of a Hub id, or `tiny`), from its tokenizer.json.

    Without tokenizer.json it falls back to AutoTokenizer, which imports torch. Raises ConfigError
    if no tokenizer can be loaded.
    """
    if folder == TINY:
        return tiny_tokenizer()
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    try:
        if not Path(folder).is_dir():
            cached_file(str(folder), "config.json")  # its error, unlike the next, has a reason
        elif not (Path(folder) / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            converted: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
            return converted
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", folder, error) from error


def choose_device() -> str:
    """`cuda` if available, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _cannot_load(what: str, folder: str | Path, error: Exception) -> ConfigError:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    if Path(folder).is_dir():
        advice = "Expected the folder of a Hugging Face causal LM, as save_pretrained writes it"
    else:
        advice = (
            "There is no such folder, so it was read as a Hugging Face id. Correct the path or the "
            f"id, or download it on a machine with a network: `hf download {folder}`"
        )
    return ConfigError(f"model: can't load the {what} of {str(folder)!r}: {reason}. {advice}")
