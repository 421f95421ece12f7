"""Loads the config's `model`: weights and tokenizer.

`resolve_model` and `load_tokenizer` import no torch. If `model` can't be loaded, the ConfigError
says what was tried.
"""

from __future__ import annotations

import re
import threading
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from retrain.config.paths import TINY, find_model
from retrain.engine.tiny import quiet, tiny_folder, tiny_tokenizer
from retrain.errors import ConfigError
from retrain.sampler import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROCESS_STATE = threading.RLock()
"""Held by a thread that loads or trains with transformers, accelerate and TRL, since their weight
initialization, gradient synchronization and random generator are global to the process."""


Attention = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
"""transformers' `attn_implementation`; `auto` is its own choice, sdpa for nearly all models."""
FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""The distribution that each kernel needs; transformers can also get one through `kernels`."""


def resolve_model(model: str, base_dir: Path) -> str:
    """A folder or id that transformers can load; makes the folder of the built-in model."""
    found = find_model(model, base_dir)
    return str(tiny_folder()) if found == TINY else found


def attention_problem(attention: str, device: str, dtype: str) -> str | None:
    """Why `attention` can't work on this `device` and `dtype`, either of which may be `auto`.

    Imports no torch. Whether the model supports it is known to `load_model`.
    """
    if attention not in FLASH:
        return None
    where = f"backend.attention: got {attention}"
    if device == "cpu":
        return f"{where}, which needs a CUDA device; set it to auto, sdpa or eager"
    if dtype == "float32":
        return (
            f"{where}, which computes in bfloat16 only; set backend.dtype to bfloat16, or attention"
            " to sdpa"
        )
    if _installed(FLASH[attention]) or _installed("kernels"):
        return None
    return (
        f"{where}, but {FLASH[attention]} is not installed; install it for your version of torch "
        f"and CUDA (`pip install {FLASH[attention]} --no-build-isolation`), or set attention to "
        "sdpa"
    )


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    attention: Attention = "auto",
) -> PreTrainedModel:
    """The causal LM in `folder` (or of a Hub id), in evaluation mode; `dtype` None is float32.

    Raises ConfigError if it can't be loaded, or does not support `attention`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        with PROCESS_STATE, quiet():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or torch.float32, **chosen
            )
    except (OSError, ValueError, ImportError) as error:
        if chosen and not isinstance(error, OSError) and _ABOUT_ATTENTION.search(str(error)):
            raise _no_attention(attention, folder, error) from error
        if isinstance(error, ImportError):
            raise
        raise _cannot_load("model", folder, error) from error
    model.to(device)  # type: ignore[arg-type]  # a string is valid
    model.train(False)
    return model


def load_for_sampling(
    folder: str | Path, adapter: Path | None, device: str | None
) -> PreTrainedModel:
    """The model in `folder`, with the LoRA weights in the folder `adapter` merged.

    In bfloat16 on CUDA, which is the default device if there is one. Raises ConfigError.
    """
    import torch

    chosen = device or choose_device()
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device: got {chosen}, but torch finds no CUDA device; use cpu")
    dtype = torch.float32 if chosen == "cpu" else torch.bfloat16
    model = load_model(folder, chosen, dtype)
    if adapter is None:
        return model
    from peft import PeftModel

    try:
        with PROCESS_STATE, quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls old names of transformers
            merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_load("LoRA weights", adapter, error) from error
    return merged


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
            _check_hub(str(folder))
            cached_file(str(folder), "config.json")  # its error, unlike the next, has a reason
        elif not (Path(folder) / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            converted: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
            return converted
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", folder, error) from error


def _check_hub(model: str) -> None:
    """Raises OSError if a model is not in the cache and the Hub can't be reached, which its own
    client says only after 25 s of retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"))
    except HfHubHTTPError:  # what loads the file has a better message
        return
    except Exception as error:  # of the HTTP library that this version of the client uses
        raise OSError(f"it is not in the cache, and the Hub can't be reached: {error}") from error


def local_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model folder, or of a Hub id in the cache; None if there is none, or the
    model is `tiny`, which needs no check. Imports no torch."""
    if model == TINY:
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        found = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    return cast(Tokenizer, found)


def choose_device() -> str:
    """`cuda` if available, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


_ABOUT_ATTENTION = re.compile("attention|attn|sdpa", re.IGNORECASE)


def _no_attention(attention: str, folder: str | Path, error: Exception) -> ConfigError:
    reason = str(error).strip().split("\n")[0].split(". ")[0].split(" Please ")[0].rstrip(".")
    return ConfigError(
        f"backend.attention: got {attention}, which {str(folder)!r} can't use: {reason}. Set it to "
        "auto, or to eager, which every model supports"
    )


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


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
