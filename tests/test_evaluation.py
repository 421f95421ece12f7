"""Evaluations are of one version of the weights (P15), also where a run was cut off meanwhile."""

import asyncio
import copy
from contextlib import nullcontext

import pytest

from benchmarks.mock_engine import LETTERS, MockAdapter, MockOptions, mock_config
from retrain.adapters.remote.published import PublishedSampler, SampledTokens
from retrain.errors import AdapterError, CheckpointError
from retrain.observe.callbacks import Callback
from retrain.observe.run_dir import read_events, surviving
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.sampler import SamplingParams
from tests.chaos.judgement import judge_log
from tests.pipe_kit import events, parts_with, rollouts_of

HELD_OUT = {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in "abc"]}
STEPS, EVERY, SAMPLES = 7, 2, 3


class SlowEvaluation(MockAdapter):
    """The evaluation of step 2 waits until `until` happened: a step was trained, or published."""

    keeps = False
    """A later publish does not change what an evaluation samples from."""
    until = ("trained", 3)
    fails = False

    def __init__(self, options, config):
        super().__init__(options, config)
        self.trained = 0
        self.later = asyncio.Event()

    def pinned(self):
        return nullcontext(copy.copy(self)) if self.keeps else None

    async def sample(self, prompt_ids, params, n=1):
        if n == SAMPLES and self.version == 2:
            await self.later.wait()
            for _ in range(100):  # what does not wait for the evaluation happens before it goes on
                await asyncio.sleep(0)
            if self.fails:
                raise AdapterError("lost")
        return await super().sample(prompt_ids, params, n)

    async def update(self, batch):
        metrics = await super().update(batch)
        self.trained += 1
        self._see("trained", self.trained)
        return metrics

    async def publish(self):
        version = await super().publish()
        self._see("published", version)
        return version

    def _see(self, *what):
        if what == self.until:
            self.later.set()


def config_in(folder, saves=1):
    return mock_config(
        folder,
        train={"total_train_steps": STEPS, "order": "in_order"},
        staleness={"target": 0},
        eval={"prompts": HELD_OUT, "every": EVERY, "samples": SAMPLES},
        checkpoint={"every": saves, "keep": 1},
    )


def adapter_of(config, **changes):
    adapter = SlowEvaluation(MockOptions(), config)
    for name, value in changes.items():
        setattr(adapter, name, value)
    return adapter


def found_in(folder):
    """The evaluations of a run, their rollouts, and the best checkpoint."""
    found = [e for e in surviving(read_events(folder)) if e["event"] == "eval"]
    rows = [r for r in rollouts_of(folder) if r["ticket"].startswith("-1.")]
    return {
        "events": [{k: v for k, v in e.items() if k != "time"} for e in found],
        "rollouts": [(r["step"], r["ticket"], r["index"], r["versions"]) for r in rows],
        "best": Checkpoints(folder / "checkpoints").best().name,
    }


@pytest.mark.parametrize("keeps", [False, True])
async def test_p15_an_evaluation_is_of_one_version_whatever_is_published_meanwhile(tmp_path, keeps):
    await train(config_in(tmp_path / "plain"))
    config = config_in(tmp_path / "slow", saves=4)
    until = ("published", 4) if keeps else ("trained", 3)
    adapter = adapter_of(config, keeps=keeps, until=until)
    result = await train(config, parts=parts_with(config, adapter))
    found = found_in(tmp_path / "slow")
    assert found == found_in(tmp_path / "plain"), "equal seeds give equal evaluations"
    assert [e["eval/step"] for e in found["events"]] == [0, 2, 4, 6, 7]
    version_of = {e["eval/step"]: e["eval/version"] for e in found["events"]}
    assert len(found["rollouts"]) == len(version_of) * 3 * SAMPLES
    assert all(versions == [version_of[step]] for step, _, _, versions in found["rollouts"])
    assert result.best_checkpoint_path.is_dir()
    log = list(read_events(tmp_path / "slow"))
    published = [e.get("version") for e in log].index(3)
    assert (published < [e.get("eval/step") for e in log].index(2)) == keeps


@pytest.mark.parametrize("ends", ["fails", "interrupted"])
async def test_p15_an_evaluation_that_was_cut_off_is_repeated_with_the_same_weights(tmp_path, ends):
    """Steps that were trained meanwhile get no checkpoint: a resume could not evaluate step 2."""
    await train(config_in(tmp_path / "whole"))
    config = config_in(tmp_path / "parts", saves=2)
    until = ("published", 3)
    adapter = adapter_of(config, keeps=True, fails=ends == "fails", until=until)
    running = asyncio.create_task(train(config, parts=parts_with(config, adapter)))
    if ends == "interrupted":
        await adapter.later.wait()
        running.cancel()
    with pytest.raises((AdapterError, asyncio.CancelledError)):
        await running
    assert max(e["step"] for e in events(tmp_path / "parts", "update")) > 2
    assert max(Checkpoints(tmp_path / "parts" / "checkpoints").steps()) == 2
    result = await train(config, resume=True)
    assert found_in(tmp_path / "parts") == found_in(tmp_path / "whole")
    assert [one["eval/step"] for one in result.evaluations] == [0, 2, 4, 6, 7]


async def test_a_run_without_steps_evaluates_once(tmp_path):
    config = mock_config(
        tmp_path, train={"total_train_steps": 0}, eval={"prompts": HELD_OUT, "samples": SAMPLES}
    )
    result = await train(config)
    assert (result.status, result.total_steps) == ("completed", 0)
    [event] = events(tmp_path, "eval")
    assert (event["eval/step"], event["eval/version"], event["eval/rollouts/ok"]) == (0, 0, 9)
    assert [one["eval/reward/mean"] for one in result.evaluations] == [event["eval/reward/mean"]]
    assert result.best_checkpoint_path == tmp_path / "checkpoints" / "step_0"


class Weights:
    """A session of a service that samples its own number, and says when it is closed."""

    def __init__(self, number):
        self.number, self.closed = number, False

    async def sample(self, prompt_ids, params, n=1):
        return [SampledTokens([self.number], [0.0], "stop")] * n

    async def close(self):
        self.closed = True


async def test_p15_a_services_weights_are_kept_while_they_are_evaluated():
    first, second = Weights(1), Weights(2)
    sampler = PublishedSampler(MockAdapter(MockOptions(), None).tokenizer, 100)
    sampler.swap(first, 0)

    async def sampled(from_):
        [completion] = await from_.sample([97], SamplingParams(), 1)
        return completion.token_ids, completion.version

    with sampler.pinned() as kept:
        sampler.swap(second, 1)
        assert await sampled(kept) == ([1], 0)
        assert await sampled(sampler) == ([2], 1)
        assert not first.closed
    await sampler.close()
    assert (first.closed, second.closed) == (True, False)


async def test_p1_a_run_that_ends_while_it_writes_its_first_checkpoint_begins_again(
    tmp_path, monkeypatch
):
    """Its log has a snapshot of step 0, which no checkpoint holds."""

    def full(folder, target):
        raise OSError(28, "No space left on device", str(target))

    class Waits(Callback):
        """The checkpoint waits until groups were played."""

        def on_train_begin(self, trainer):
            self.trainer = trainer

        async def state_dict(self):
            while not self.trainer.run_dir.tally.outcomes:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            return {}

    with monkeypatch.context() as disk:
        disk.setattr("retrain.pipeline.checkpoint._put", full)
        with pytest.raises(CheckpointError):
            await train(config_in(tmp_path), callbacks=[Waits()])
    assert events(tmp_path, "rollout")[0]["time"] < events(tmp_path, "snapshot")[0]["time"]
    assert not Checkpoints(tmp_path / "checkpoints").steps()
    config = config_in(tmp_path)
    await train(config, resume=True)
    book, _ = judge_log(tmp_path, config, len(LETTERS))
    assert (book.wrong, book.step) == ([], STEPS)


async def test_a_callback_that_stops_the_run_loses_no_step_to_an_evaluation(tmp_path):
    """Which a kept version lets go on for many steps."""

    class Stops(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 4:
                trainer.request_stop()

    config = config_in(tmp_path, saves=0)
    adapter = adapter_of(config, keeps=True, until=("trained", 4))
    result = await train(config, callbacks=[Stops()], parts=parts_with(config, adapter))
    assert (result.status, result.total_steps) == ("completed", 4)
    assert max(Checkpoints(tmp_path / "checkpoints").steps()) == 4
    assert [one["eval/step"] for one in result.evaluations] == [0, 2]


async def test_the_best_of_another_run_is_not_that_of_a_run_that_starts_from_it(tmp_path):
    await train(config_in(tmp_path / "first"))
    checkpoint = tmp_path / "first" / "checkpoints" / f"step_{STEPS}"
    harder = {"type": "list", "rows": [{"prompt": "a=", "answer": "zzzz"}]}
    config = mock_config(
        tmp_path / "second",
        train={"total_train_steps": STEPS + 1},
        eval={"prompts": harder, "every": 1, "samples": 1},
    )
    result = await train(config, start_from=checkpoint)
    assert result.best_checkpoint_path is not None


async def test_a_resume_without_evaluations_forgets_no_best_checkpoint(tmp_path):
    harder = {"type": "list", "rows": [{"prompt": "a=", "answer": "zzzz"}]}
    best = None
    for steps, prompts in ((2, HELD_OUT), (3, None), (4, harder)):
        config = mock_config(
            tmp_path,
            train={"total_train_steps": steps},
            **({"eval": {"prompts": prompts, "every": 1, "samples": 1}} if prompts else {}),
        )
        result = await train(config, resume=best is not None)
        best = best or result.best_checkpoint_path
        assert result.best_checkpoint_path == best
