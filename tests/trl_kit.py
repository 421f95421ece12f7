"""A one-layer model folder, samples and trainers for the tests of the TRL adapter."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.adapters.trl.options import TrlOptions
from retrain.algorithms.batching import batch_of
from retrain.config import Plugin, RunConfig
from retrain.types import Batch, Sample

VOCABULARY = 32


@functools.cache
def model_folder(seed: int = 0) -> str:
    """A random Llama of one layer with a word-level tokenizer, as save_pretrained writes it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    transformers.utils.logging.disable_progress_bar()
    folder = tempfile.mkdtemp(prefix="trl-kit-")
    atexit.register(shutil.rmtree, folder)
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    words |= {f"w{number}": number for number in range(4, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a wrong position or mask shows
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_rng_state(state)
    return folder


def run_config(loss: str = "dapo", **sections: Any) -> RunConfig:
    """A run on the one-layer model; `loss_config` and whole sections as keywords."""
    algorithm = {"type": "grpo", "loss": loss, "loss_config": sections.pop("loss_config", {})}
    values = {
        "model": model_folder(),
        "prompts": Plugin(type="list"),
        "algorithm": algorithm,
        "sampling": {"max_tokens": 6},
        "train": {"total_train_steps": 6},
    }
    return RunConfig.model_validate({**values, **sections})


def options(**keys: Any) -> TrlOptions:
    return TrlOptions.model_validate({"learning_rate": 1e-2, "device": "cpu", **keys})


def sample(
    prompt: int, completion: str, rng: random.Random, *, group: str = "0.0.0", run: str = ""
) -> Sample:
    """`prompt` tokens, then one token a letter: `s` was sampled, `e` came from the environment."""
    mask = [0] * prompt + [int(letter == "s") for letter in completion]
    ids = [rng.randrange(4, VOCABULARY) for _ in mask]
    advantage = rng.uniform(-2, 2)
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=[rng.uniform(-4, -2) * on for on in mask],
        advantages=[advantage * on for on in mask],
        versions=[0 if on else -1 for on in mask],
        group_id=group,
        run_id=run,
    )


def batch(samples: Sequence[Sample], loss: str = "dapo", **loss_config: Any) -> Batch:
    return batch_of(samples, loss=loss, loss_config=loss_config)


def apart(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a token to train, each as a rollout by itself: TRL's rows."""
    return [replace(s, run_id="") for s in samples if any(s.loss_mask)]


def ragged(seed: int = 0, rows: int = 7) -> list[Sample]:
    """Rows of many lengths: one or two turns, a dropped row, a forked one."""
    rng = random.Random(seed)
    shapes = ["ssss", "ss", "sseess", "ssssss", "s", "eess", "sssees"]
    made = [
        sample(rng.randrange(2, 6), shapes[row % len(shapes)], rng, group=f"0.{row // 2}.0")
        for row in range(rows)
    ]
    dropped = sample(4, "eee", rng, group="0.8.0")
    fork = [sample(3, "ss", rng, group="0.9.0", run="fork"), sample(5, "sss", rng, run="fork")]
    return [*made, dropped, *fork]


def trainer_of(config: RunConfig, scratch: Path, **keys: Any) -> Any:
    """A PipeTrainer outside its thread, for one loss at a time."""
    from retrain.adapters.trl.build import build_trainer
    from retrain.adapters.trl.plan import run_plan
    from retrain.engine.models import load_tokenizer

    return build_trainer(
        options(**keys),
        config,
        run_plan(config),
        folder=model_folder(),
        tokenizer=load_tokenizer(model_folder()),
        scratch=scratch,
        feed=NoFeed(),
    )


class NoFeed:
    """For a trainer that a test drives by hand."""

    def check_stop(self) -> None:
        """Never."""


def native_rows(samples: Sequence[Sample]) -> dict[str, Any]:
    """The batch as GRPOTrainer itself lays it out: prompts padded left, completions right."""
    import torch
    from trl.trainer.utils import pad

    cuts = [s.loss_mask.index(1) if any(s.loss_mask) else len(s.loss_mask) - 3 for s in samples]
    rows = list(zip(samples, cuts, strict=True))

    def padded(values: list[Any], side: str) -> Any:
        return pad([torch.tensor(v) for v in values], padding_value=0, padding_side=side)

    return {
        "prompt_ids": padded([s.token_ids[:c] for s, c in rows], "left"),
        "prompt_mask": padded([[1] * c for _, c in rows], "left"),
        "completion_ids": padded([s.token_ids[c:] for s, c in rows], "right"),
        "completion_mask": padded([[1] * len(s.token_ids[c:]) for s, c in rows], "right"),
        "tool_mask": padded([s.loss_mask[c:] for s, c in rows], "right"),
        "old_per_token_logps": padded([s.logprobs[c:] for s, c in rows], "right"),
        "advantages": torch.tensor([max(s.advantages, key=abs) for s in samples]),
        "num_items_in_batch": torch.tensor(float(sum(sum(s.loss_mask) for s in samples))),
    }
