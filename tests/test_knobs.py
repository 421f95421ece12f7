"""No knob is dead: every key of the config changes a run on every backend, or is refused there.

A key of `PIPE` is read before a batch reaches any backend: it is changed on one without a model.

`KNOBS` has one entry a key, with a value to change it to and, where that shows in a certain
situation alone, the situation. A key of the models that is missing in the table fails the test, so
a new knob must say here what it does.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from retrain.config import RunConfig
from retrain.engine.tiny import tiny_folder
from retrain.sampler import SamplingParams
from tests import knob_kit
from tests.knob_kit import BACKENDS, BASE, HERE, OPTIONS, PARTS, merged, trace


@dataclass(frozen=True)
class Knob:
    to: Any
    """The value that the key is changed to."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the run is like on both sides of the change."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Backend -> a part of the refusal."""
    lose: str = ""
    """Of the first such request the reply is lost."""
    elsewhere: str = ""
    """`file::test` that shows the effect, where a run here can't: it ends the process, say."""


def scene(**keys: Any) -> dict[str, Any]:
    return {"environment": {"type": f"{PARTS}:Scene", **keys}}


def slow(stage: str) -> Knob:
    """A deadline that user code misses: its rollouts become timeouts."""
    return Knob(0.01, {**scene(slow=stage), **SOON})


RANKS = "test_ranks.py::test_two_ranks_train_as_one_process_does"
ANOTHER = "another model"
"""Stands for the folder of one."""
SOON = {"train": {"max_failed_groups": 2}}
"""The run ends at its second failure, not at the sixteenth."""
SLOW_REWARD = {"rewards": [{"type": f"{PARTS}:Letters", "slow": True}]}
FLAT = {"rewards": [{"type": f"{PARTS}:Letters", "flat": True}]}
EVAL = {"eval": {"prompts": {"type": "list", "rows": ["g=", "h="]}, "every": 1, "samples": 1}}
FILLED = {"chat": {"template": "knob_template.jinja"}}
AHEAD = {"rollout": {"slots": 2}, "staleness": {"target": 1}}
STRAGGLER = {
    **AHEAD,
    **scene(trained=4),
    "train": {"order": "ready", "shuffle": False, "total_train_steps": 7},
}
LORA = {"backend": {"lora": {}}}
RATIO = {"algorithm": {"loss": "importance_sampling"}}
WATCH = "test_watch.py::test_p4_"
REMOTE_MERGE = dict.fromkeys(("tinker", "weaver"), "merge_lora has no effect")

ROWS = [{"prompt": f"{a}=", "other": f"{a}{a}=", "answer": a, "key": a * 2} for a in "abcdef"]
SOURCE = {"type": "list", "rows": ROWS}
OF_SOURCES = {
    "prompt_column": "other", "answer_column": "key", "system": "Say it.", "limit": 1,
    "filter": {"answer": ["a", "c"]}, "map": {"prompt": "{other}"}, "held_out": 0.5,
}  # fmt: skip
"""The keys of every prompt source, with another value."""

WEIGHTS = "test_the_weight_at_each_step"
TOTALS = "test_the_total_and_how_it_grows_with_each_reward"

KNOBS: dict[str, Knob] = {
    "name": Knob("other"),
    "model": Knob(ANOTHER),
    "prompts.type": Knob({"type": "file", "path": "../data/echo.jsonl"}),
    **{f"prompts.{k}": Knob(to, {"prompts": SOURCE}) for k, to in OF_SOURCES.items()},
    **{
        f"eval.prompts.{k}": Knob(to, {"eval": {**EVAL["eval"], "prompts": SOURCE}})
        for k, to in OF_SOURCES.items()
    },
    "environment.type": Knob({"type": "single_turn"}),
    "opponents.type": Knob(
        {"X": {"type": "file.py:name"}},
        elsewhere="test_seats.py::"
        "test_an_opponent_speaks_for_its_seat_and_is_not_trained"),
    "rewards.0.type": Knob({"type": "exact_match"}),
    "rewards.0.name": Knob("spelling"),
    **{
        f"rewards.0.{key}": Knob(value, elsewhere=f"test_composition.py::{test}")
        for key, value, test in (
            ("weight.start", 0.5, WEIGHTS),
            ("weight.end", 0.5, WEIGHTS),
            ("weight.steps", 2, WEIGHTS),
            ("weight.begin", 1, WEIGHTS),
            ("weight.shape", "step", WEIGHTS),
            ("clip", [0.0, 0.1], TOTALS),
            ("only_if.name", "environment", TOTALS),
            ("only_if.at_least", 0.5, TOTALS),
            ("of", [], TOTALS),
        )
    },
    "rewards.0.processes": Knob(
        1, elsewhere="test_reward_processes.py::test_a_run_uses_the_workers_and_ends_them"),
    "algorithm.type": Knob("rloo"),
    "algorithm.group_size": Knob(3),
    "algorithm.loss": Knob("cispo"),
    "algorithm.loss_config": Knob({"beta": 0.3}, {"algorithm": {"loss": "dro"}},
                                  elsewhere="test_loss_keys.py::test_every_key_of_every_loss"),
    "algorithm.normalisation": Knob("batch", {"algorithm": {"loss": "ppo"}}),
    "algorithm.kl_penalty": Knob(0.5),
    "algorithm.mismatch.type": Knob("mask", {"algorithm": {"mismatch": {"low": 1.5}}}),
    "algorithm.mismatch.level": Knob(
        "sequence", elsewhere="test_mismatch.py::"
        "test_weights_are_the_hand_worked_ones_on_floats_and_on_tensors"),
    "algorithm.mismatch.low": Knob(1.5, {"algorithm": {"mismatch": {}}}),
    "algorithm.mismatch.high": Knob(0.5, {"algorithm": {"mismatch": {}}}),
    "backend.type": Knob("tinkr", refused=dict.fromkeys(BACKENDS, "tinker")),
    "sampling.max_tokens": Knob(2),
    "sampling.temperature": Knob(0.5),
    "sampling.top_p": Knob(0.5),
    "sampling.top_k": Knob(3),
    "sampling.stop": Knob(list(string.ascii_letters)),
    "chat.template": Knob("none"),
    "chat.arguments": Knob({"mark": "!"}, FILLED),
    "chat.tools.format": Knob(
        "hermes", elsewhere="test_slots.py::test_p11_what_setup_opens_close_may_close"),
    "chat.tools.show": Knob(
        "system",
        elsewhere="test_chat_calls.py::test_a_system_message_shows_the_tools_and_the_tokens_extend"),
    "rollout.max_turns": Knob(1, scene(turns=2)),
    "rollout.max_tokens": Knob(3,
        elsewhere="test_calls.py::"
        "test_budgets_are_exact_under_parallel_calls_and_given_back_when_a_client_leaves"),
    "rollout.max_sequence_length": Knob(6),
    "rollout.slots": Knob(2, {"train": {"groups_per_step": 2}}),
    "rollout.setup_concurrency": Knob(1),
    "rollout.reward_concurrency": Knob(
        1, {**SLOW_REWARD, "rollout": {"slots": 2}, "train": {"groups_per_step": 2}}),
    "endpoint.host": Knob("::1", elsewhere="test_endpoint_server.py::test_addresses"),
    "endpoint.port": Knob(1, elsewhere="test_endpoint_server.py::test_a_port_that_is_taken"),
    "endpoint.public_url": Knob(
        "https://box", elsewhere="test_endpoint_server.py::test_addresses"),
    "endpoint.reward": Knob(
        True,
        elsewhere="test_endpoint_server.py::"
        "test_posted_rewards_are_off_unless_the_config_allows_them"),
    "records.tokens": Knob(True),
    "endpoint.honour": Knob(
        ["stop"],
        elsewhere="test_endpoint_server.py::"
        "test_every_name_without_effect_is_logged_once"),
    "staleness.target": Knob(1, {"rollout": {"slots": 2}}),
    "staleness.max": Knob(99, STRAGGLER),
    "train.total_train_steps": Knob(1),
    "train.groups_per_step": Knob(2),
    "train.seed": Knob(1),
    "train.shuffle": Knob(False),
    "train.order": Knob(
        "ready", {**AHEAD, **scene(played=2), "train": {"shuffle": False}}),
    "train.no_signal": Knob("refill", FLAT),
    "train.max_refill": Knob(1, {**FLAT, "train": {"no_signal": "refill"}}),
    "train.stop_after_flat_steps": Knob(1, FLAT),
    "train.max_failed_groups": Knob(1, scene(broken="step")),
    "train.check_publish": Knob(True),
    "eval.prompts.type": Knob({"type": "list", "rows": ["i="]}, EVAL),
    "eval.every": Knob(2, EVAL),
    "eval.samples": Knob(2, EVAL),
    "eval.pass_threshold": Knob(0.0, EVAL),
    "eval.opponents.type": Knob(
        {"X": {"type": "file.py:name"}},
        elsewhere="test_seats.py::"
        "test_a_run_trains_and_reports_each_seat"),
    "checkpoint.every": Knob(1),
    "checkpoint.keep": Knob(2, {"checkpoint": {"every": 1}}),
    "checkpoint.merge_lora": Knob(True, {"backend": {"lora": {}}}, refused=REMOTE_MERGE),
    "deadlines.setup": slow("setup"),
    "deadlines.reset": slow("reset"),
    "deadlines.step": slow("step"),
    "deadlines.agent": Knob(1,
        elsewhere="test_agent.py::"
        "test_an_agent_that_never_ends_is_a_timeout"),
    "deadlines.reward": Knob(0.01, {**SLOW_REWARD, **SOON}),
    "deadlines.close": slow("close"),
    "deadlines.sample": Knob(1e-6),
    "deadlines.update": Knob(1e-6),
    "deadlines.publish": Knob(1e-6),
    "deadlines.checkpoint": Knob(1e-6),
    "deadlines.outage": Knob(
        1,
        elsewhere="test_failures.py::"
        "test_p13_an_outage_that_lasts_ends_the_run_with_a_checkpoint"),
    "deadlines.blocked": Knob(
        1, elsewhere=WATCH + "user_code_that_blocks_the_loop_is_named_and_the_process_ends"),
    "deadlines.stall": Knob(
        1, elsewhere=WATCH + "a_run_in_which_nothing_moves_ends_and_says_what_it_waits_for"),
    "loggers.0.type": Knob({"type": f"{PARTS}:Notes", "to": "notes.txt"}),
    "run_dir": Knob("elsewhere"),
    "base_dir": Knob("elsewhere", refused=dict.fromkeys(BACKENDS, "base_dir: unknown key")),
}  # fmt: skip
"""The keys of RunConfig."""
PIPE = {
    *(f"{part}.{key}" for part in ("prompts", "eval.prompts") for key in OF_SOURCES),
    *("name", "run_dir", "base_dir", "loggers.0.type", "prompts.type", "environment.type"),
    *("rewards.0.type", "rewards.0.name", "algorithm.type"),
    *("rollout.max_turns", "rollout.slots", "rollout.setup_concurrency"),
    *("rollout.reward_concurrency",),
    *("staleness.target", "staleness.max", "algorithm.group_size", "train.order"),
    *("train.total_train_steps", "train.groups_per_step"),
    *("train.shuffle", "train.no_signal", "train.max_refill", "train.stop_after_flat_steps"),
    *("train.max_failed_groups", "eval.prompts.type", "eval.every", "eval.samples"),
    *("eval.pass_threshold", "deadlines.setup", "deadlines.reset", "deadlines.step"),
    *("deadlines.reward", "deadlines.close"),
}
"""Those that no adapter and no assembly of a backend reads."""

OPTIMIZER = {
    "learning_rate": Knob(1e-3),
    "lr_scheduler": Knob("linear"),
    "warmup_steps": Knob(2),
    "beta1": Knob(0.5),
    "beta2": Knob(0.5),
    "eps": Knob(1e-3),
    "weight_decay": Knob(0.5),
    "max_grad_norm": Knob(0.125),
}
REMOTE = {
    **OPTIMIZER,
    "url": Knob("http://elsewhere"),
    "base_model": Knob("tiny:64"),
    "lora.r": Knob(2),
    "lora.seed": Knob(5),
    "lora.train_unembed": Knob(False),
    "lora.train_mlp": Knob(False),
    "lora.train_attn": Knob(False),
    "native_losses": Knob(["cross_entropy"], RATIO),
    "assume_sum": Knob(True, {"backend": {"url": "http://elsewhere"}}),
    "context_length": Knob(6),
    "tokenizer": Knob(ANOTHER),
}
STARTS = "test_vllm_runs.py::test_a_run_starts_restarts_and_ends_its_own_server"
ADAPTERS = "test_vllm_runs.py::test_a_run_samples_adapters_by_running_servers"
COMMAND = "test_vllm_runs.py::test_options_reach_the_command_line_of_each_server"
VLLM = {
    "type": STARTS,
    "url": ADAPTERS,
    "python": STARTS,
    "devices": COMMAND,
    "tensor_parallel": COMMAND,
    "gpu_memory": COMMAND,
    "args": COMMAND,
    "publish": "test_vllm_runs.py::"
    "test_the_first_line_names_processes_and_servers_and_the_way_of_publishing",
    "folder": "test_vllm_runs.py::test_weights_are_written_to_the_given_folder",
    "in_flight": "test_vllm_publish.py::test_weights_change_in_flight",
    "check": "test_vllm_whole.py::test_another_model_is_found_before_the_first_step",
    "restarts": "test_vllm_sampler.py::test_a_server_that_dies_too_often_is_given_up",
    "start_seconds": "test_vllm_runs.py::test_a_server_that_does_not_answer_is_named",
}
"""The keys of the sampler `vllm`, which needs a server."""
BACKEND_KNOBS: dict[str, dict[str, Knob]] = {
    "trl": {
        **OPTIMIZER,
        "lora.r": Knob(2, LORA),
        "lora.alpha": Knob(1.0, LORA),
        "lora.dropout": Knob(0.5, LORA),
        "lora.target_modules": Knob(["q_proj"], LORA),
        "micro_batch_rows": Knob(1),
        "micro_batch_tokens": Knob(1),
        "device": Knob("cuda"),
        "dtype": Knob("bfloat16"),
        "attention": Knob("eager"),
        "gradient_checkpointing": Knob(True),
        "threads": Knob(2),
        "processes": Knob(2, elsewhere=RANKS),
        "sharding": Knob("full", elsewhere=RANKS),
        "max_rows": Knob(1),
        "args": Knob({"optim": "sgd"}),
        **{f"sampler.{key}": Knob(None, elsewhere=test) for key, test in VLLM.items()},
    },
    "tinker": {
        **REMOTE,
        "wire": Knob("proto"),
        "checkpoint_ttl": Knob(3600),
        "project": Knob("a-project"),
        "tags": Knob(["a-tag"]),
    },
    "weaver": {
        **REMOTE,
        "training_mode": Knob("full_ft", {"backend": {"type": "weaver", "learning_rate": 1e-2}}),
        "request_tokens": Knob(2),
        "sampler_ttl": Knob(60),
        "resend": Knob(
            True,
            {"backend": {"url": "http://elsewhere", "assume_sum": True}},
            lose="backward-passes",
        ),
    },
}
"""The keys of each backend's Options."""


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted, those of nested models included; an item of a list is number 0."""
    for name, info in model.model_fields.items():
        parts = [t for t in _types(info.annotation) if issubclass(t, BaseModel) and t is not model]
        item = "0." if get_origin(info.annotation) is tuple else ""
        for part in parts:
            yield from keys_of(part, f"{prefix}{name}.{item}")
        if not parts:
            yield prefix + name


def _types(annotation: Any) -> Iterator[type]:
    inner = get_args(annotation)
    if inner:
        yield from (found for one in inner for found in _types(one))
    elif isinstance(annotation, type):
        yield annotation


def test_every_key_of_the_config_is_in_the_table():
    assert set(KNOBS) == set(keys_of(RunConfig))


@pytest.mark.parametrize("backend", OPTIONS)
def test_every_key_of_a_backend_is_in_its_table(backend):
    assert set(BACKEND_KNOBS[backend]) == set(keys_of(OPTIONS[backend]))


CASES = [
    pytest.param(
        *(backend, key, knob),
        id=f"{backend}-{key}",
        marks=pytest.mark.xdist_group(f"knobs of {backend}"),  # they share the runs in `_before`
    )
    for backend in BACKENDS
    for key, knob in (
        *KNOBS.items(),
        *((f"backend.{key}", knob) for key, knob in BACKEND_KNOBS.get(backend, {}).items()),
    )
    if not knob.elsewhere and (backend == "mock") == (key in PIPE)
]


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """No knob is for the page at a run's end, which would take a fifth of the time."""
    monkeypatch.setattr("retrain.pipeline.recorder.write_report", lambda folder: folder)


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """The built-in model with another chat template."""
    folder = tmp_path_factory.mktemp("another") / "model"
    shutil.copytree(tiny_folder(), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}.{{ m.content }}{% endfor %}"
    )
    return str(folder)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_same_run_leaves_the_same_trace(backend, tmp_path):
    run = on(backend)
    assert await trace(run, tmp_path / "1") == await trace(run, tmp_path / "2")


def on(backend: str, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    plain = {"chat": {"template": "none"}} if backend == "mock" else {}
    return merged(BASE, {"backend": BACKENDS[backend], **plain}, given)


_before: dict[str, Any] = {}
"""The trace of a run before the change, which many knobs share."""


@pytest.mark.slow(0.3)
@pytest.mark.parametrize(("backend", "key", "knob"), CASES)
async def test_a_changed_knob_changes_the_run_or_is_refused(backend, key, knob, another, tmp_path):
    run = on(backend, knob.given)
    before = await _traced_once(run, tmp_path / "before", knob.lose)
    changed = merged(run)
    change(changed, key.split("."), another if knob.to is ANOTHER else knob.to)
    after = await trace(changed, tmp_path / "after", lose=knob.lose)
    if backend in knob.refused:
        assert after.get("refused"), f"{key} was taken"
        assert knob.refused[backend] in after["error"]
    else:
        assert not after.get("refused") or key == "backend.device", after.get("error")
        assert after != before, f"{key}: {knob.to!r} changed nothing"


async def _traced_once(run: dict[str, Any], folder: Path, lose: str) -> knob_kit.Trace:
    name = json.dumps([run, lose], sort_keys=True)
    if name not in _before:
        _before[name] = await trace(run, folder, lose=lose)
    assert not _before[name].get("refused"), _before[name]["error"]
    return _before[name]


def change(mapping: Any, keys: list[str], value: Any) -> None:
    """Set one key; what a `type` is changed to may be its whole section."""
    *sections, last = keys
    for section in sections[:-1]:
        mapping = mapping[int(section)] if section.isdigit() else mapping.setdefault(section, {})
    if sections:
        holder: Any = int(sections[-1]) if sections[-1].isdigit() else sections[-1]
        if last == "type" and isinstance(value, dict):
            mapping[holder] = value
            return
        mapping = mapping[holder] if isinstance(mapping, list) else mapping.setdefault(holder, {})
    mapping[last] = value


def test_what_is_shown_elsewhere_is_shown_there():
    for key, knob in (*KNOBS.items(), *BACKEND_KNOBS["trl"].items()):
        if knob.elsewhere:
            file, name = knob.elsewhere.split("::")
            assert f"def {name}(" in (HERE / file).read_text(), key


# Sampling, and what it does to the losses


def test_every_field_of_the_sampling_params_has_its_key():
    """The stop tokens come from the chat template, the seed from train.seed."""
    own = set(SamplingParams.__dataclass_fields__) - {"stop_token_ids", "seed"}
    assert own == {key.removeprefix("sampling.") for key in KNOBS if key.startswith("sampling.")}
