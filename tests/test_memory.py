"""The estimate of a run's memory: parameters against real models, parts against options."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import transformers  # noqa: E402 - needs torch

from retrain.adapters.base import Forecast  # noqa: E402
from retrain.adapters.trl import memory  # noqa: E402
from retrain.adapters.trl.memory import Needs, Shape, forecast, read_shape  # noqa: E402
from retrain.adapters.trl.options import TrlOptions  # noqa: E402
from retrain.cli.run import main  # noqa: E402
from retrain.engine import available  # noqa: E402
from retrain.engine.available import Card  # noqa: E402
from tests import trl_kit as kit  # noqa: E402

SMALL = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, SMALL),
    "llama, tied": (transformers.LlamaConfig, {**SMALL, "tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, SMALL),
    "qwen3": (transformers.Qwen3Config, {**SMALL, "head_dim": 32}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**SMALL, **EXPERTS, "head_dim": 32}),
    "qwen3 8b": (transformers.Qwen3Config, QWEN3_8B),
}


def saved(name: str, folder: Path) -> Any:
    """A config, which is written to the folder."""
    kind, keys = SHAPES[name]
    config = kind(**keys)
    config.save_pretrained(folder)
    return config


def needs(shape: Shape, *, cuda: bool = False, **keys: Any) -> Needs:
    """Of the kit's run, with these sections and `backend` keys."""
    options = TrlOptions.model_validate(keys.pop("backend", {}))
    return Needs(shape, options, kit.run_config(**keys), cuda)


@pytest.mark.parametrize("name", SHAPES)
def test_the_parameters_of_a_shape_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = saved(name, tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    found = read_shape(str(tmp_path))
    assert found is not None
    real = sum(parameter.numel() for parameter in model.parameters())
    assert found.parameters == pytest.approx(real, rel=0.02)  # without biases and norms of heads


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of experts, in peft
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_the_parameters_of_lora(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = saved(name, tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = [p for p in get_peft_model(model, lora).parameters() if p.requires_grad]
    found = read_shape(str(tmp_path))
    assert found is not None
    real = sum(p.numel() for p in trained)
    assert real <= found.lora(4) <= 1.1 * real


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_a_layer_keeps_no_more_than_estimated(name: str, attention: str, half: bool) -> None:
    """Counted on a real forward pass, as the difference of models of three and of two layers."""
    kind, keys = SHAPES[name]
    sizes = {**keys, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    rows, length = 4, 64
    kept = []
    for layers in (2, 3):
        config = kind(**{**sizes, "num_hidden_layers": layers})
        config._attn_implementation = attention
        model = transformers.AutoModelForCausalLM.from_config(config)
        kept.append(saved_bytes(model, rows, length, half))
    shape = Shape(config.to_dict())
    backend = {"attention": attention, "dtype": "bfloat16" if half else "float32"}
    found = needs(shape, backend=backend, rollout={"max_sequence_length": length})
    cast = 2 * shape.layer if half and not shape.experts else 0
    expected = rows * length * found._layer() + cast
    assert 0.95 * (kept[1] - kept[0]) <= expected <= 1.5 * (kept[1] - kept[0])


def saved_bytes(model: Any, rows: int, length: int, half: bool) -> int:
    """Bytes of all storages, but the parameters', that autograd keeps after a forward pass."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, 100, (rows, length))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sum(size for size, _ in kept.values())


BIG = Shape(QWEN3_8B)
COUNT = BIG.parameters
VLLM = {"type": "vllm", "url": "http://localhost:8000"}


@pytest.mark.parametrize(
    ("backend", "part", "expected"),
    [
        ({}, "weights", 4 * COUNT),
        ({}, "gradients", 4 * COUNT),
        ({}, "optimizer", 8 * COUNT),
        ({}, "publishing", None),  # it happens without gradients
        ({"lora": {}}, "weights", 2 * COUNT + 4 * BIG.lora(16)),
        ({"lora": {}}, "optimizer", 8 * BIG.lora(16)),
        ({"processes": 8}, "gradients", 8 * COUNT),
        ({"processes": 8, "sharding": "full"}, "weights", 4 * COUNT // 8),
        ({"args": {"optim": "sgd"}}, "optimizer", 0),
        ({"sampler": VLLM}, "sampler", None),
        ({"sampler": VLLM}, "cache", None),
    ],
)
def test_an_option_moves_its_part(backend: dict[str, Any], part: str, expected: Any) -> None:
    assert needs(BIG, cuda=True, backend=backend).parts().get(part) == expected


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"gradient_checkpointing": False}),
        ({"micro_batch_tokens": 2048}, {"micro_batch_tokens": 4096}),
        ({"micro_batch_rows": 1}, {}),
        ({}, {"attention": "eager"}),
        ({"lora": {}}, {}),
    ],
)
def test_an_option_moves_the_activations(less: dict[str, Any], more: dict[str, Any]) -> None:
    run: dict[str, Any] = {"sampling": {"max_tokens": 1000}}
    found = [needs(BIG, cuda=True, backend=keys, **run)._activations() for keys in (less, more)]
    assert found[0] < found[1]


def test_a_frozen_copy_of_the_model_counts() -> None:
    assert needs(BIG, cuda=True, loss_config={"beta": 0.1}).parts()["reference"] == 4 * COUNT
    lora = needs(BIG, cuda=True, loss_config={"beta": 0.1}, backend={"lora": {}})
    assert lora.parts()["reference"] == 0  # the frozen base is the reference


def test_auto_gives_small_models_large_passes_and_others_smaller_ones() -> None:
    tiny = read_shape("tiny")
    assert tiny is not None
    assert needs(tiny).micro_batch == 2_048
    assert needs(BIG).micro_batch == 256
    assert needs(BIG, cuda=True).micro_batch == 16_384
    assert needs(BIG, backend={"micro_batch_tokens": 77}).micro_batch == 77


def test_too_little_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kit.run_config()
    shape = read_shape(found.model)
    assert shape is not None
    total = sum(Needs(shape, TrlOptions(), found, cuda=False).parts().values())
    for free, warned in ((None, False), (total, False), (total - 1, True)):
        monkeypatch.setattr(memory, "ram", lambda free=free: free)
        line = forecast(TrlOptions(device="cpu"), found)
        assert bool(line.warning) == warned
        assert f"{total / 1e9:.2f} GB" in line.text
    texts = [forecast(TrlOptions(device="cpu", processes=n), found).text for n in (1, 6)]
    alone, six = (float(text.split()[2]) for text in texts)
    assert six > 5 * alone
    cards = [Card("NVIDIA H100", 80 * 10**9), Card("NVIDIA A10", 10**8)]
    monkeypatch.setattr(memory, "cards", lambda: cards)
    assert "NVIDIA A10" in forecast(TrlOptions(processes=2), found).warning
    assert not forecast(TrlOptions(), found).warning


def test_a_dry_run_shows_the_estimate_and_names_the_key_to_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["quickstart", "backend.device=cpu", "--dry-run"]
    assert main(command) == 0
    assert capsys.readouterr().err.startswith("memory: about ")
    saved("qwen3 8b", tmp_path)  # without weights: none is read
    monkeypatch.setattr(memory, "ram", lambda: 64 * 10**9)
    assert main([*command, f"model={tmp_path}"]) == 0
    assert "backend.max_rows" in capsys.readouterr().err.partition("warning: ")[2]
    assert main([*command, "backend.sampler={type: vllm, python: gone/bin/python}"]) == 2
    assert capsys.readouterr().err.startswith("memory: about ")
    assert main([*command, "model=./gone"]) == 2
    assert "memory" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hidden_size": 8}', '{"text_config": 1}'])
def test_the_memory_of_a_model_of_unknown_shape_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for model in (str(tmp_path), "nobody/no-such-model"):
        assert read_shape(model) is None
        found = forecast(TrlOptions(), kit.run_config().model_copy(update={"model": model}))
        assert found == Forecast(found.text)
        assert "unknown" in found.text


def test_a_hub_id_is_read_from_the_cache_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    saved("qwen3", repository / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = read_shape("some/model")
    assert found is not None
    assert found.head_size == 32
    assert read_shape("some/other") is None


# --- what is there


def test_cards_are_those_that_cuda_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command in the place of nvidia-smi, since no test can count on a card."""
    rows = "NVIDIA H100, 81000\nNVIDIA H100, 500\nX, [N/A]\n"
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{rows}' | ([ \"$1\" != -i ] && cat || head -n $2)\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(available, "_built_for_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = [Card("NVIDIA H100", 81000 * 2**20), Card("NVIDIA H100", 500 * 2**20)]
    assert available.cards() == both
    assert available.present_devices() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert available.cards() == both[:1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert available.cards() == []
    command.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert available.cards() == []
    assert available.present_devices() is None
    monkeypatch.undo()
    assert available._built_for_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize("version", [1, 2])
def test_ram_is_bounded_by_control_groups(version: int, tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert available.ram(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    assert available.ram(proc, groups) == 1000 * 1024
    line = "0::/a/b" if version == 2 else "4:cpu,memory:/a/b\n0::/c"
    (proc / "self" / "cgroup").write_text(f"{line}\n")
    root = groups if version == 2 else groups / "memory"
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder, limit in ((root / "a" / "b", "max"), (root / "a", "5000"), (root, "9999")):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (*zip(names[:2], (limit, "4000"), strict=True),
                           ("memory.stat", f"anon 7\n{names[2]} 1500\n")):  # fmt: skip
            (folder / name).write_text(text)
    assert available.ram(proc, groups) == 5000 - 4000 + 1500
    assert available.ram() is not None or sys.platform != "linux"
