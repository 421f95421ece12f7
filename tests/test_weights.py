"""Snapshots of plain and PEFT-wrapped models, and what a sampler accepts."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from retrain.engine.weights import check_weights, copy_weights, snapshot
from retrain.errors import AdapterError
from tests.weights_kit import digest

pytestmark = pytest.mark.filterwarnings(  # peft asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def llama(tied: bool = False, attention_bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
            attention_bias=attention_bias,
        )
    )


def wrapped(model: Any, **options: Any) -> Any:
    """The model with a LoRA whose weights are far from 0."""
    config = peft.LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def test_a_snapshot_is_a_copy_that_shares_nothing() -> None:
    model = llama()
    weights = snapshot(model)
    assert weights.keys() == model.state_dict().keys()
    before = digest(weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert digest(weights) == before
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_tied_weights_are_one_tensor_of_the_snapshot() -> None:
    weights = snapshot(llama(tied=True))
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert snapshot(llama())["lm_head.weight"] is not weights["model.embed_tokens.weight"]


LORAS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "rank_stabilised": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "bias": {"target_modules": ["v_proj"], "lora_bias": True, "bias": "none"},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "saved_modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", LORAS)
def test_a_lora_snapshot_equals_pefts_own_merge_and_changes_nothing(kind: str) -> None:
    base = llama(attention_bias=kind == "bias")
    names = base.state_dict().keys()
    model = wrapped(base, **LORAS[kind])
    if kind == "saved_modules":
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    before = digest(model.state_dict())
    weights = snapshot(model)
    assert digest(model.state_dict()) == before
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert weights.keys() == merged.keys() == names
    for name, tensor in merged.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0)


def test_a_lora_over_conv1d_layers_is_transposed_as_peft_does() -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2))
    model = wrapped(base, target_modules=["c_attn"], fan_in_fan_out=True)
    weights, merged = snapshot(model), copy.deepcopy(model).merge_and_unload().state_dict()
    torch.testing.assert_close(weights, dict(merged), atol=1e-6, rtol=0)
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]


def test_a_merged_lora_is_not_added_twice_and_a_disabled_one_not_at_all() -> None:
    base = llama()
    plain = digest(snapshot(base))
    model = wrapped(base, target_modules=["q_proj"])
    with model.disable_adapter():
        assert digest(snapshot(model)) == plain
    once = snapshot(model)
    model.merge_adapter()
    torch.testing.assert_close(snapshot(model), once, atol=1e-6, rtol=0)


def test_copied_weights_make_the_same_logits() -> None:
    source, target = wrapped(llama(), target_modules=["q_proj"]).eval(), llama().eval()
    copy_weights(target, snapshot(source))
    ids = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(target(ids).logits, source(ids).logits, atol=1e-5, rtol=0)


def test_weights_of_another_model_are_refused_with_names() -> None:
    model, weights = llama(), snapshot(llama())
    norm = "model.norm.weight"
    wrong = {
        f"missing.*{norm}": {name: t for name, t in weights.items() if name != norm},
        "unknown.*extra": {**weights, "extra": torch.ones(1)},
        "wrong shape.*norm": {**weights, norm: torch.ones(3)},
    }
    for message, given in wrong.items():
        with pytest.raises(AdapterError, match=message):
            check_weights(model, given)


def test_one_name_of_two_tied_weights_is_enough_but_they_may_not_differ() -> None:
    model = llama(tied=True)
    weights = snapshot(model)
    check_weights(model, weights)
    check_weights(model, {name: t for name, t in weights.items() if name != "lm_head.weight"})
    with pytest.raises(AdapterError, match="untied"):
        check_weights(model, {**weights, "lm_head.weight": weights["lm_head.weight"] + 1})
