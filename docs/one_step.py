"""The training loop on one page: from prompts to weights, step after step.

`retrain.train` computes the same numbers with queues between the stages, so that sampling and
training overlap. It also handles failed rollouts, staleness, evaluation, checkpoints and the run
directory.
"""

from collections.abc import Iterator
from itertools import count, islice

from retrain.algorithms.batching import batch_of, make_samples
from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.rollout import Rollouts, Slot
from retrain.types import Metrics, Prompt, Ticket


async def learn(parts: Parts) -> list[Metrics]:
    """Train according to `parts.config`; return the metrics of each update."""
    config = parts.config
    history: list[Metrics] = []
    async with parts.scorer.serving(), parts.open_adapter() as adapter:  # loads the model
        chat = Chat(adapter.tokenizer, template=parts.chat_template)
        rollouts = Rollouts(config, adapter.sampler, chat, adapter.context_length)
        slot = Slot(config.algorithm.group_size, parts.environment, rollouts, parts.scorer)
        prompts = in_order(parts)
        for _ in range(config.train.total_train_steps):
            issued = islice(prompts, config.train.groups_per_step)
            # a group: several rollouts of one prompt, sampled turn by turn, with their rewards
            groups = [await slot.play(prompt) for prompt in issued]
            advantages = parts.algorithm.advantages(groups)  # one per rollout or per token
            samples = make_samples(groups, advantages)  # tokens, loss mask, advantages
            batch = batch_of(
                samples,
                loss=parts.loss,
                loss_config=parts.loss_config,
                normalisation=parts.normalisation,
            )
            if parts.skips_flat and not any(any(sample.advantages) for sample in samples):
                continue  # no advantage, so no gradient
            history.append(await adapter.update(batch))  # loss, gradient, optimizer
            await adapter.publish()  # the next rollouts are sampled from the new weights
        await slot.close()  # closes the environments
    return history


def in_order(parts: Parts) -> Iterator[Prompt]:
    """The prompts in the order in which a run issues them, epoch after epoch."""
    train = parts.config.train
    for epoch in count():
        for row in parts.prompts.order(epoch, train.seed, train.shuffle):
            yield parts.prompts.prompt(Ticket(epoch, row), train.seed)
