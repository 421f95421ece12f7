"""P16: after a publish the sampler serves the trainer's weights, or the run reports it."""

import logging
import math
from dataclasses import replace

import pytest

from retrain.adapters.base import Capabilities
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import assemble
from retrain.config import parse_config
from retrain.engine.sampler import LocalSampler
from retrain.errors import AdapterError, ConfigError
from retrain.observe.run_dir import read_events
from retrain.pipeline import train, verify
from retrain.pipeline.serving import checks_publishes
from retrain.pipeline.verify import ERROR, PublishCheck
from retrain.scoring import reward
from retrain.types import Completion, Group, Prompt, Trajectory, Turn
from tests.backends_kit import FULL, LORA, run_of
from tests.pipe_kit import events

STEPS = 3


@reward
def early(completion: str) -> float:
    """It differs from the first step on."""
    return sum(letter < "P" for letter in completion) / 4


RUN = {
    "prompts": {"type": "list", "rows": [f"{letter}=" for letter in "abcdefgh"]},
    "rewards": [{"type": f"{__name__}:early"}],
    "algorithm": {"type": "grpo", "group_size": 4},
    "sampling": {"max_tokens": 4},
}
BACKENDS = {
    "trl": FULL["trl"],
    "trl-lora": {**FULL["trl"], "lora": {"r": 4}},
    "tinker": LORA["tinker"],
    "weaver": FULL["weaver"],
}


def config_in(folder, backend="trl", *, target=0, order="in_order", **train_keys):
    keys = {"total_train_steps": STEPS, "groups_per_step": 4, "order": order, "check_publish": True}
    return run_of(
        folder,
        {**BACKENDS[backend], "learning_rate": 2e-2},
        **RUN,
        staleness={"target": target},
        train={**keys, **train_keys},
    )


def warnings_in(caplog):
    found = [r for r in caplog.records if r.name == verify.__name__]
    return [record.getMessage() for record in found if record.levelno == logging.WARNING]


def outcome(row):
    """What a check may not change in a row."""
    return {
        key: value
        for key, value in row.items()
        if key != ERROR and not key.startswith(("time/", "tokens/per", "trainer/"))
    }


@pytest.mark.parametrize(
    ("backend", "target"), [("trl", 0), ("trl-lora", 1), ("tinker", 1), ("weaver", 0)]
)
async def test_p16_each_publish_serves_the_weights_of_the_trainer(
    backend, target, tmp_path, caplog
):
    result = await train(config_in(tmp_path, backend, target=target))
    assert len(result.history) == STEPS
    assert all(0 <= row[ERROR] < 1e-4 < row["grad_norm"] for row in result.history)
    assert not warnings_in(caplog)
    assert not events(tmp_path, "fault")


async def test_p16_a_check_changes_nothing_else(tmp_path):
    rows = {}
    for on in (True, False):
        result = await train(config_in(tmp_path / str(on), target=1, check_publish=on))
        rows[on] = [outcome(row) for row in result.history]
        assert all((ERROR in row) == on for row in result.history)
    assert rows[True] == rows[False]
    kinds = [[e["event"] for e in read_events(tmp_path / str(on))] for on in (True, False)]
    assert sorted(kinds[0]) == sorted(kinds[1])


load_weights, sample = LocalSampler.load_weights, LocalSampler.sample


async def keep_the_first_weights(self, weights, version):
    self._worker.current.version = version


async def lose_the_head(self, weights, version):
    """What `lm_head` shares with the embedding is lost there too."""
    state = self._worker.current.model.state_dict()
    lost = ("lm_head.weight", "model.embed_tokens.weight")
    await load_weights(self, {**weights, **{name: state[name].clone() for name in lost}}, version)


async def publish_late(self, weights, version):
    """Serves the version before under the present one's number."""
    before = getattr(self, "before", None) or {
        name: tensor.clone() for name, tensor in self._worker.current.model.state_dict().items()
    }
    self.before = {name: tensor.clone() for name, tensor in weights.items()}
    await load_weights(self, before, version)


async def label_late(self, prompt_ids, params, n=1):
    found = await sample(self, prompt_ids, params, n)
    return [replace(one, version=max(0, one.version - 1)) for one in found]


@pytest.mark.parametrize(
    ("method", "fault", "differs"),
    [
        ("load_weights", keep_the_first_weights, True),
        ("load_weights", publish_late, True),
        ("load_weights", lose_the_head, True),
        ("sample", label_late, False),
    ],
)
async def test_p16_a_wrong_publish_is_reported(
    method, fault, differs, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(LocalSampler, method, fault)
    result = await train(config_in(tmp_path, target=1))
    assert [row[ERROR] > verify.BOUND for row in result.history] == [differs] * STEPS
    assert [row["version"] for row in result.history] == [1, 2, 3]
    assert len(events(tmp_path, "fault")) == STEPS
    assert len(warnings_in(caplog)) == 1, "the others are only recorded"


class Fake:
    """An adapter whose sampler and trainer differ by `gaps`, one for each check."""

    context_length = 100

    def __init__(self, *gaps, checks="free", exact=True, version=3):
        self.capabilities = Capabilities(losses=frozenset(), checks=checks)
        self.exact, self.version, self.gaps = exact, version, iter(gaps)
        self.sampler = self
        self.prompts = []

    async def sample(self, prompt_ids, params, n=1):
        assert params.seed is not None
        self.prompts.append(prompt_ids)
        return [Completion([7], [-1.0], "x", "length", self.version)] * n

    async def own_logprobs(self, sequences):
        gap = next(self.gaps)
        if gap is None:
            raise AdapterError("no forward pass")
        return [[*[0.0] * (len(row) - 1), -1.0 - gap] for row in sequences]


def check_of(adapter, reported, **train_keys):
    config = parse_config({"prompts": ["a"], "train": train_keys})
    return PublishCheck(config, adapter, reported.append)


def groups_of(length):
    turn = Turn(list(range(length)), Completion([1], [0.0], "", "stop", 2))
    prompt = Prompt("0.0.0", [])
    return [Group(prompt, [Trajectory(prompt), Trajectory(prompt, turns=[turn])])]


async def checked(adapter, count=1, length=9, **train_keys):
    """The differences that checks found, and how many of them were reported."""
    reported = []
    check = check_of(adapter, reported, **train_keys)
    if check.needs_bound:
        await check.begin(3, groups_of(length))
    found = [await check.published(3, groups_of(length)) for _ in range(count)]
    return [one.get(ERROR) for one in found], len(reported)


@pytest.mark.parametrize(
    ("gaps", "exact", "reported"),
    [
        ([0.0009], True, 0),
        ([0.0011], True, 1),
        ([math.nan], True, 1),
        ([0.1, 0.39], False, 0),  # the first one sets the bound
        ([0.1, 0.41], False, 1),
        ([0.0, 0.019], False, 0),
        ([0.0, 0.021], False, 1),
        ([0.9, 0.99], False, 0),
        ([0.9, 1.01], False, 1),
        ([3.0, 0.0], False, 1),  # wrong from the start on
    ],
)
async def test_the_bound_is_fixed_in_float32_and_measured_in_lower_precision(gaps, exact, reported):
    found, count = await checked(Fake(*gaps, exact=exact), check_publish=True)
    assert found == pytest.approx(gaps[-1:], nan_ok=True)
    assert count == reported


@pytest.mark.parametrize(
    ("checks", "wanted", "on"),
    [
        ("free", "auto", True),
        ("billed", "auto", False),
        ("no", "auto", False),
        ("billed", True, True),
        ("free", False, False),
    ],
)
def test_auto_checks_where_it_costs_nothing(checks, wanted, on):
    config = parse_config({"prompts": ["a"], "train": {"check_publish": wanted}})
    assert checks_publishes(config, Fake(checks=checks)) is on


@pytest.mark.parametrize("options", [TinkerOptions, WeaverOptions])
def test_only_a_vendors_own_service_is_billed(options):
    own = options.vendor.url
    urls = ("hosted", own, own.upper().replace("HTTPS", "https") + "/x", "local", "http://[::1]:8")
    found = [options(url=url).capabilities().checks for url in urls]
    assert found == ["billed", "billed", "billed", "free", "free"]


async def test_auto_takes_a_fiftieth_of_the_time(monkeypatch):
    """Each check takes 2 s here, and a publish follows every 10 s."""
    clock = [0.0]

    class Slow(Fake):
        async def own_logprobs(self, sequences):
            clock[0] += 2.0
            return await super().own_logprobs(sequences)

    monkeypatch.setattr(verify.time, "monotonic", lambda: clock[0])
    for wanted, expected in (("auto", [0, 10]), (True, list(range(20)))):
        clock[0] = 0.0
        adapter = Slow(*[0.0] * 20)
        check = check_of(adapter, [], check_publish=wanted)
        when = []
        for publish in range(20):
            if await check.published(3, groups_of(9)):
                when.append(publish)
            clock[0] += 10.0
        assert when == expected


async def test_a_trainer_that_cannot_score_ends_the_checks_of_auto_only(caplog):
    assert await checked(Fake(None, None), 3) == ([None] * 3, 0)
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(AdapterError, match="no forward pass"):
        await checked(Fake(None), check_publish=True)


@pytest.mark.parametrize(("length", "kept"), [(9, range(9)), (99, range(35, 99))])
async def test_the_prompt_is_the_end_of_a_short_opening(length, kept):
    adapter = Fake(0.0)
    await checked(adapter, length=length)
    assert adapter.prompts == [list(kept)]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": {"type": "benchmarks/mock_engine.py:MockOptions"}},
        {"algorithm": {"type": "sft"}, "prompts": {"type": "list", "rows": ["a"]}},
    ],
)
def test_a_check_that_cannot_work_is_an_error_at_the_start(changes):
    config = parse_config({**RUN, "train": {"check_publish": True}, **changes})
    with pytest.raises(ConfigError) as caught:
        assemble(config)
    assert any(p.startswith("train.check_publish: got true") for p in caught.value.problems)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
async def test_p16_rounding_in_bfloat16_is_not_reported(lora, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(BACKENDS, "trl", {**FULL["trl"], "dtype": "bfloat16", "lora": lora})
    result = await train(config_in(tmp_path))
    assert all(row[ERROR] < verify.LOWEST for row in result.history)
    assert not warnings_in(caplog)
