"""The values that flow through the pipe, in the order in which they appear.

Row -> Prompt (with its Ticket) -> Turn... -> Trajectory -> Group -> Sample... -> Batch -> Metrics.

A token is sampled once and never encoded again: `Completion` holds the ids, log-probs and weight
version that the sampler returned, and everything downstream uses these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

Metrics = dict[str, float]

Outcome = Literal["ok", "invalid", "infra_error", "timeout"]
"""Only `ok` enters group statistics; the others are masked and counted, never scored as 0."""

StopReason = Literal["stop", "length", "context"]
"""`stop`: a stop token or string; `length`: max_tokens; `context`: the model's context is full."""


class Message(TypedDict):
    """One chat message; the optional keys follow the chat-template convention."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class Ticket(NamedTuple):
    """The identity of a prompt in a run: ledger, resume and guarantee P1 count tickets."""

    epoch: int
    row: int
    attempt: int = 0
    """0 at first, one higher each time the prompt is issued again."""

    def __str__(self) -> str:
        return f"{self.epoch}.{self.row}.{self.attempt}"

    @classmethod
    @lru_cache(maxsize=4096)  # a group's ticket is read at every stage
    def parse(cls, text: str) -> Ticket:
        """The ticket that `str()` wrote."""
        epoch, row, attempt = text.split(".")
        return cls(int(epoch), int(row), int(attempt))


class Row(NamedTuple):
    """A row of a dataset in the form that every source returns."""

    messages: Sequence[Message]
    answer: Any = None  # whatever the dataset contains
    metadata: Mapping[str, Any] = {}
    plain: bool = False
    """Whether the prompt is a string, and no list of messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a rollout starts from; `id` is its ticket as a string."""

    id: str
    messages: Sequence[Message]
    answer: Any = None  # any value of the dataset: only the user's reward reads it
    metadata: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """For random tasks: the same for all rollouts of a group and at every attempt, another one in
    the next epoch; 0 to 2**31 - 1."""
    index: int = 0
    """The number of the rollout in its group, from 0. `seed + index` differs between rollouts."""
    plain: bool = False
    """Whether the row has a string, and no list of messages: functions of TRL get what it has."""

    @property
    def ticket(self) -> Ticket:
        return Ticket.parse(self.id)

    @property
    def text(self) -> str:
        """The text of the last user message, or of the last message if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "user":
                return str(message["content"])
        return self.messages[-1]["content"] if self.messages else ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log of the probability, under the distribution that was sampled from; (T,)."""
    text: str
    """Decoded without special tokens."""
    stop_reason: StopReason
    version: int
    """The version of the weights that sampled it, the oldest if they changed meanwhile; -1 if it is
    from the dataset."""
    versions: Sequence[int] = ()
    """The version per token, (T,), if the weights changed while it was sampled; else empty."""

    def __post_init__(self) -> None:
        """Raises ValueError unless `versions` fits the tokens, and begins with the oldest."""
        if self.versions and (
            len(self.versions) != len(self.token_ids) or min(self.versions) != self.version
        ):
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens and version {self.version} has the "
                f"versions {list(self.versions)}; expected one per token, the oldest {self.version}"
            )


class Turn(NamedTuple):
    """The ids that the sampler got, its completion, and the environment's observation."""

    prompt_ids: Sequence[int]
    completion: Completion
    observation: Sequence[Message] = ()
    seat: str = ""
    """Who speaks, in a rollout with several trainable parties; see `Trajectory.seat`."""
    parent: int | None = None
    """Only of an agent's calls: the earlier turn of the rollout that this one continues, or None
    if it begins anew. Without an agent, each turn follows the one before."""
    messages: Sequence[Message] = ()
    """Only of an agent's calls: the messages since the parent's reply, and the reply."""
    reward: float = 0.0
    """The reward of this turn: of the environment's step, or posted by the agent."""
    answer: str | None = None
    """The reply without its reasoning, if that differs from `completion.text`."""
    reasoning: str = ""
    """What the model thought before the answer."""

    @property
    def text(self) -> str:
        """The reply without its reasoning."""
        return self.completion.text if self.answer is None else self.answer

    @property
    def length(self) -> int:
        """The number of its tokens, prompt and completion."""
        return len(self.prompt_ids) + len(self.completion.token_ids)

    def is_start_of(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` begins with all tokens of this turn."""
        given, said = self.prompt_ids, self.completion.token_ids
        near, end = max(0, len(given) - 16), len(given) + len(said)
        return (
            len(token_ids) >= end
            # Unequal ids nearly always differ at the end, where they are compared first.
            and (not said or token_ids[end - 1] == said[-1])
            and list(token_ids[near:end]) == [*given[near:], *said]
            and list(token_ids[:near]) == list(given[:near])
        )


@dataclass(slots=True)
class Trajectory:
    """One rollout of one prompt: filled turn by turn, then scored."""

    prompt: Prompt
    turns: list[Turn] = field(default_factory=list)
    """In the order in which they ended."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The reward per component, unweighted; `environment` is the sum of the step rewards."""
    info: dict[str, Any] = field(default_factory=dict)
    """The merged `info` of the environment's steps; `error` is the cause of a failure."""
    outcome: Outcome = "ok"
    reward: float = 0.0
    """By default the weighted sum of the components; only valid if the outcome is `ok`."""
    messages: Sequence[Message] = ()
    """The whole conversation, with the model's replies and the observations."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools offered to the model, in the structure that chat templates expect."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per stage: `sample`, `environment`, `reward`."""
    outage: bool = field(default=False, compare=False)
    """Whether it failed because something that it needs can't be reached (`is_outage`)."""
    seat: str = ""
    """Whose trajectory it is, in a rollout with several trainable parties, such as players."""
    index: int = 0
    """The number of its rollout in the group, from 0."""
    result: str | None = None
    """What an agent returned."""
    turn_rewards: Sequence[float] = ()
    """The part of `reward` that each turn earned; the last one also earned what they leave."""
    token_rewards: Sequence[float] = ()
    """The part of `reward` that each sampled token earned."""

    @property
    def agent_error(self) -> str:
        """The error of an agent whose rollout is scored all the same; empty if there is none."""
        scored = self.outcome == "ok" and not self.info.keys().isdisjoint(("truncated", "unusable"))
        return str(self.info.get("error", "")) if scored else ""

    @property
    def completion(self) -> str:
        """What an agent returned, else the answer of the last turn, without its reasoning.

        Empty if nothing was sampled, or the reasoning of the last turn never ended. The whole text
        is `turns[-1].completion.text`.
        """
        if self.result is not None:
            return self.result
        return self.turns[-1].text if self.turns else ""

    @property
    def reasoning(self) -> str:
        """The reasoning of the last turn, without its tags."""
        return self.turns[-1].reasoning if self.turns else ""

    @property
    def versions(self) -> list[int]:
        """The version of the weights, the oldest of each turn."""
        return [turn.completion.version for turn in self.turns]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model sampled in all turns."""
        turns = self.turns
        if len(turns) == 1:  # the common case, fast
            return len(turns[0].completion.token_ids)
        return sum([len(turn.completion.token_ids) for turn in turns])


@dataclass(slots=True)
class Group:
    """The G trajectories of one prompt, which a group-relative advantage compares."""

    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def ticket(self) -> Ticket:
        return self.prompt.ticket

    @property
    def by_seat(self) -> list[Group]:
        """The trajectories with the same seat, as groups: those are compared with each other."""
        if len({trajectory.seat for trajectory in self.trajectories}) < 2:
            return [self]
        seats: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            seats.setdefault(trajectory.seat, []).append(trajectory)
        return [Group(self.prompt, t) for t in seats.values()]

    @property
    def scored(self) -> list[Trajectory]:
        """The trajectories with the outcome `ok`."""
        return [t for t in self.trajectories if t.outcome == "ok"]

    @property
    def oldest_version(self) -> int | None:
        """The lowest version among the sampled tokens; None if nothing was sampled."""
        return min(self.versions, default=None)

    @property
    def versions(self) -> set[int]:
        """The versions of the weights that sampled the tokens."""
        said = [turn.completion for t in self.trajectories for turn in t.turns]
        found = {completion.version for completion in said}
        found.update(*[completion.versions for completion in said if completion.versions])
        found.discard(-1)
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence of T tokens; every stream has the length T.

    Raises ValueError when the lengths differ.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    """1 for tokens that the model sampled, else 0 (prompt, tool and user tokens)."""
    logprobs: Sequence[float]
    """The log-prob of each token by the sampler; 0.0 where the mask is 0."""
    advantages: Sequence[float]
    """Credit of each token; 0.0 where the mask is 0."""
    versions: Sequence[int]
    """The version of the weights that sampled each token; -1 where the mask is 0."""
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """More values per token, such as `reference_logprobs`."""
    group_id: str = ""
    """The ticket of the prompt as a string."""
    run_id: str = ""
    """The rollout. A rollout whose history was rewritten has several samples with one run_id."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        fits = (
            length == len(self.loss_mask) == len(self.logprobs)
            and length == len(self.advantages) == len(self.versions)
            and not (self.streams and {length} != set(map(len, self.streams.values())))
        )
        if not fits:
            own = (self.loss_mask, self.logprobs, self.advantages, self.versions)
            names = ("loss_mask", "logprobs", "advantages", "versions", *self.streams)
            streams = zip(names, (*own, *self.streams.values()), strict=True)
            wrong = {name: len(stream) for name, stream in streams if len(stream) != length}
            raise ValueError(
                f"a sample of group {self.group_id!r} has {length} token_ids, but {wrong}; "
                "expected streams of the same length"
            )


class Denominators(NamedTuple):
    """What a loss over the whole batch is divided by, so that micro-batches add up to it."""

    tokens: int
    """Tokens with loss_mask 1."""
    sequences: int
    """Rollouts with at least one such token; a rollout can have several samples."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one optimizer step."""

    samples: Sequence[Sample]
    loss: str
    loss_config: Mapping[str, Any]  # the loss's own keys, checked against Capabilities at start-up
    denominators: Denominators
