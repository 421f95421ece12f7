"""What a card changes: each check runs on the CPU, and with `-m gpu` the same on CUDA.

On CUDA results are compared with the CPU's, in float32 without TF32 unless a check says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.adapters.trl.adapter import TrlAdapter
from retrain.engine.models import load_model, load_tokenizer
from retrain.engine.sampler import LocalSampler
from retrain.sampler import SamplingParams
from tests import trl_kit as kit

ABSENT = not torch.cuda.is_available()
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="needs a CUDA device")]
)
PROMPTS = [[2, 5], [2, 6, 7], [2, 8, 9, 10, 11]]


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU, and a card if there is one; float32 without TF32, as on the CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


def adapter(device: str, **keys: Any) -> TrlAdapter:
    sections = keys.pop("sections", {})
    keys = {"dtype": "float32", "gradient_checkpointing": False, **keys, "device": device}
    return TrlAdapter(kit.options(**keys), kit.run_config(**sections))


async def trained(trl: TrlAdapter, steps: int, first: int = 0) -> dict[str, Any]:
    """The weights, on the CPU, after steps on fixed samples, each of them published."""
    for step in range(first, first + steps):
        await trl.update(kit.batch(kit.ragged(step)))
        await trl.publish()
    weights = await trl._in_thread("weights")
    return {name: tensor.float().cpu() for name, tensor in weights.items()}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
async def test_the_sampler_reports_the_log_probs_of_a_plain_forward(device, attention):
    """Rows of different prompts share a padded batch; the forward of each row is alone."""
    model = load_model(kit.model_folder(), device, attention=attention)
    assert model.config._attn_implementation == attention
    plain = load_model(kit.model_folder())
    async with LocalSampler(model, load_tokenizer(kit.model_folder())) as sampler:
        assert sampler._worker.current.model.config._attn_implementation == attention
        for prompt in PROMPTS:
            for row in await sampler.sample(prompt, SamplingParams(max_tokens=9, seed=1), 3):
                ids = [*prompt, *row.token_ids]
                with torch.inference_mode():
                    logits = plain(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
                expected = logits.log_softmax(-1)[range(len(row.token_ids)), list(row.token_ids)]
                assert list(row.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
        again = await sampler.logprobs_of(PROMPTS)
    async with LocalSampler(plain, load_tokenizer(kit.model_folder())) as sampler:
        for ours, cpu in zip(again, await sampler.logprobs_of(PROMPTS), strict=True):
            assert ours == pytest.approx(cpu, abs=1e-4)


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_checkpointing": True},
        {"lora": {"r": 4}, "attention": "eager"},
        {"sections": {"loss_config": {"beta": 0.1}}, "attention": "eager"},
    ],
    ids=str,
)
async def test_the_adapter_takes_the_steps_of_the_cpu(device, keys):
    """The reference run has the defaults of the CPU: recomputing and eager attention change none.

    Adam's first steps move by the gradient's sign, so that weights without a gradient of their own
    may differ by a step's size; only SGD keeps rounding errors small.
    """
    plain = {"args": {"optim": "sgd"}, "learning_rate": 0.1}
    same = {name: value for name, value in keys.items() if name in ("lora", "sections")}
    async with adapter("cpu", **plain, **same) as trl:
        expected = await trained(trl, 2)
    async with adapter(device, **plain, **keys) as trl:
        assert trl._thread.trainer.model.device.type == device
        found = await trained(trl, 2)
        models = [trl._thread.trainer.model, trl.sampler._worker.current.model]
        models += [trl._thread.trainer.ref_model] if "sections" in keys else []
        used = {model.config._attn_implementation for model in models}
        assert used == {keys.get("attention", "sdpa")}
        before = {n: t.float() for n, t in load_model(kit.model_folder()).state_dict().items()}
    assert distance(found, before) > 1e-3
    assert distance(found, expected) < (1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
async def test_bfloat16_computes_in_half_precision_and_keeps_float32_weights(device, lora):
    """Weights stay in float32, the sampler's copy and LoRA's base are bfloat16."""
    keys = {"lora": lora, "args": {"optim": "sgd"}, "learning_rate": 0.1}
    async with adapter(device, **keys) as trl:
        expected = await trained(trl, 1)
    async with adapter(device, **keys, dtype="bfloat16", gradient_checkpointing=True) as trl:
        model = trl._thread.trainer.model
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        if lora:
            assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert trl.sampler._worker.current.model.dtype == torch.bfloat16
        inputs = []
        layer = model.get_base_model() if lora else model
        layer.model.layers[0].mlp.gate_proj.register_forward_hook(
            lambda *call: inputs.append(call[-1].dtype)
        )
        found = await trained(trl, 1)
        assert model.is_activation_checkpointing
        # the forward and its repetition in the backward pass, per micro-batch
        assert set(inputs) == {torch.bfloat16}
        assert len(inputs) % 2 == 0
    assert 0 < distance(found, expected) < 0.05


async def test_a_checkpoint_continues_bit_by_bit(device, tmp_path: Path):
    async with adapter(device) as trl:
        await trained(trl, 2)
        state = await trl.save(tmp_path)
        whole = await trained(trl, 2, first=2)
    async with adapter(device) as trl:
        await trl.load(state)
        resumed = await trained(trl, 2, first=2)
    # attention's backward pass on CUDA adds in any order
    assert distance(resumed, whole) <= (0 if device == "cpu" else 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(ABSENT, reason="needs a CUDA device")
async def test_the_defaults_of_a_card():
    """bfloat16, recomputation, large micro-batches, and a sampler on the card."""
    async with TrlAdapter(kit.options(device="auto"), kit.run_config()) as trl:
        trainer = trl._thread.trainer
        assert trainer.args.bf16
        assert trainer.args.activation_checkpointing
        assert trainer.cut.keywords["tokens"] == 16_384
        assert trl.sampler._worker.current.model.device.type == "cuda"
        rows = await trl.sampler.sample([2, 5], SamplingParams(max_tokens=6), 4)
        assert [row.version for row in rows] == [0] * 4
        metrics = await trl.update(kit.batch(kit.ragged()))
        assert metrics["grad_norm"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(ABSENT, reason="needs a CUDA device")
def test_the_estimate_of_a_card_is_of_its_order(tmp_path: Path):
    """nvidia-smi lists the card that torch sees."""
    from retrain.engine.available import cards

    _, total = torch.cuda.mem_get_info()
    found = cards()
    assert len(found) == torch.cuda.device_count()
    assert 0 < found[0].free <= total
    assert found[0].name == torch.cuda.get_device_name(0)


def test_the_benchmark_runs_its_quick_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """All its parts but compilation, which takes half a minute; what fails stops nothing else."""
    from benchmarks import gpu, gpu_parts

    def burning(*_: Any, **__: Any) -> None:
        raise FloatingPointError("the device burns")

    monkeypatch.setattr(torch, "compile", lambda forward, **_: burning)
    variants = {name: gpu_parts.VARIANTS[name] for name in ("bfloat16", "flash_attention_2")}
    monkeypatch.setattr(gpu_parts, "VARIANTS", variants)
    gpu.main(["--device", "cpu", "--quick", "--here"])
    said = capsys.readouterr().out
    for text in ("on CPU", "LocalSampler", "continuous batching", "TrlAdapter", "S=1", "bfloat16"):
        assert text in said
    assert "skipped" in said
    assert "RuntimeError: backend.attention" in said
    assert "FloatingPointError" in said
    assert said.count("failed:") == 2


def test_a_part_of_the_benchmark_ends_at_its_limit(capsys: pytest.CaptureFixture[str]):
    from benchmarks import gpu

    gpu.main(["--device", "cpu", "--quick", "--parts", "sampling", "--limit", "0.2"])
    assert "0.2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "cpu"}, "CUDA"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "but flash-attn is not installed"),
    ],
    ids=str,
)
def test_flash_attention_that_can_not_work_is_reported_before_a_model_loads(keys, said):
    from retrain.engine.models import _installed

    if not keys and (_installed("flash-attn") or _installed("kernels")):
        pytest.skip("it is installed")
    keys = {"device": "auto", "dtype": "auto", **keys, "attention": "flash_attention_2"}
    problems = kit.options(**keys).problems(kit.run_config())
    assert len(problems) == 1
    assert problems[0].startswith("backend.attention: got flash_attention_2")
    assert said in problems[0]


@pytest.mark.skipif(not ABSENT, reason="there is one")
def test_flash_attention_on_a_machine_without_a_card(monkeypatch: pytest.MonkeyPatch):
    from retrain.adapters.trl.build import place_model
    from retrain.errors import ConfigError

    monkeypatch.setattr("retrain.engine.models._installed", lambda package: True)
    options = kit.options(device="auto", attention="flash_attention_3")
    assert options.problems(kit.run_config()) == []
    with pytest.raises(ConfigError, match=r"got flash_attention_3.*CUDA"):
        place_model(options)


def test_a_model_without_this_attention_is_a_config_error(tmp_path: Path):
    from transformers import GptOssConfig, GptOssForCausalLM

    from retrain.errors import ConfigError

    config = GptOssConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16
    )
    config.update({"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2})
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"backend.attention: got sdpa.*'.*'"):
        load_model(tmp_path, attention="sdpa")
    with pytest.raises(ConfigError, match=r"model.*'.*nothing'"):
        load_model(tmp_path / "nothing", attention="sdpa")
    assert load_model(tmp_path).config._attn_implementation == "eager"
