"""The built-in model, and the way from a config's `model` to weights and a tokenizer."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from retrain.engine import tiny
from retrain.engine.models import load_model, load_tokenizer, resolve_model
from retrain.engine.tiny import recipe_hash, tiny_folder, tiny_tokenizer
from retrain.errors import ConfigError
from tests.weights_kit import digest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("cache"))


def render(messages: list[dict[str, object]], **options: object) -> str:
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@given(st.text(alphabet=[*map(chr, range(32, 127)), "\n"]))
def test_known_characters_survive_encoding_one_token_each(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    if "<|" not in text and '": "' not in text:  # a marker written out is that marker
        assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_json_around_a_call_is_a_token_a_piece_and_none_that_decoding_skips(
    folder: Path,
) -> None:
    call = '<tool_call>{"name": "calc", "arguments": {"x": "1+2"}}</tool_call>'
    for tokenizer in (tiny_tokenizer(), load_tokenizer(folder)):
        ids = tokenizer.encode(call)
        assert len(ids) == 4 + len("calc") + len("x") + len("1+2")
        assert tokenizer.decode(ids, skip_special_tokens=True) == call


def test_unknown_characters_are_the_unknown_token() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("é\t") == [tokenizer.unk_token_id] * 2
    assert tokenizer.decode(tokenizer.encode("aéb"), skip_special_tokens=True) == "ab"


def test_all_roles_tools_and_calls_are_rendered() -> None:
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+x?"},
        {"role": "assistant", "content": "so", "tool_calls": [CALL]},
        {"role": "tool", "content": "7"},
    ]
    assert render(conversation, tools=TOOLS, add_generation_prompt=True) == (
        "<|system|>be brief\nadd(a, b)<|user|>1+x?<|assistant|>so"
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call><|end|>'
        "<|tool|>7<|assistant|>"
    )
    assert render(conversation[1:2], tools=TOOLS) == "<|system|>add(a, b)<|user|>1+x?"
    assert render(conversation[:2]) == "<|system|>be brief<|user|>1+x?"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_each_rendering_is_a_prefix_of_the_next(tools: list[dict[str, object]] | None) -> None:
    conversation: list[dict[str, object]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "user", "content": "v"},
    ]
    end = tiny_tokenizer().eos_token
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = render(conversation[:turn], tools=tools, add_generation_prompt=True)
        answered = render(conversation[: turn + 1], tools=tools)
        assert answered.startswith(prompt)
        assert answered.endswith(end)
        assert render(conversation[: turn + 2], tools=tools).startswith(answered)


def test_the_folder_is_an_ordinary_model_folder(folder: Path) -> None:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert 90_000 < parameters < 120_000
    assert model.config.max_position_embeddings == 1024
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert tokenizer.encode("a b\n~") == tiny_tokenizer().encode("a b\n~")


def test_every_build_has_the_same_weights_and_leaves_the_global_seed_alone(
    folder: Path, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    again = tiny_folder(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert digest(load_model(again).state_dict()) == digest(load_model(folder).state_dict())


def test_a_changed_recipe_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe_hash()
    monkeypatch.setattr(tiny, "SEED", 1)
    assert recipe_hash() != before


def test_builders_that_race_leave_one_whole_folder(tmp_path: Path) -> None:
    found: list[Path] = []
    barrier = threading.Barrier(3)

    def build() -> None:
        barrier.wait()
        found.append(tiny_folder(tmp_path))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert list(tmp_path.iterdir()) == [found[0]]


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RETRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny.default_cache() == tmp_path / "retrain"
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "own"))
    assert tiny.default_cache() == tmp_path / "own"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="the tokenizers of older transformers import torch themselves",
)
def test_a_tokenizer_alone_imports_no_torch(folder: Path) -> None:
    script = (
        "import sys; from retrain.engine.models import load_tokenizer, resolve_model\n"
        f"load_tokenizer('tiny'); load_tokenizer({str(folder)!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_relative_folder_is_looked_up_beside_the_config_then_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name, tmp_path) == str(folder)
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "config.json").write_text("{}")
    assert resolve_model(folder.name, tmp_path) == str(tmp_path / folder.name)


@pytest.mark.parametrize(
    "path", ["./mine", "mine/", "models/mine/deep", "/nowhere/at/all", "~nobody/x"]
)
def test_a_path_that_leads_nowhere_says_where_was_looked(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder not found: /"):
        resolve_model(path, tmp_path)


def test_what_exists_but_holds_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model("empty", tmp_path)
    (tmp_path / "empty" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"only LoRA weights.*checkpoint\.merge_lora=true"):
        resolve_model("empty", tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        resolve_model("notes.txt", tmp_path)


def test_a_hub_id_is_kept_and_one_that_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("somebody/no-such-model", tmp_path) == "somebody/no-such-model"
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match="somebody/no-such-model"):
            load("somebody/no-such-model")


def test_a_broken_model_folder_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="Hugging Face"):
        load_model(tmp_path)
