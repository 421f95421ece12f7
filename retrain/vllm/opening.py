"""Opens a VllmSampler: starts or meets the servers, and checks that they fit the run."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from retrain.engine.limits import Limits
from retrain.engine.sampler import eos_ids
from retrain.errors import AdapterError, ConfigError
from retrain.sampler import Tokenizer
from retrain.supervision.sharing import Capacity
from retrain.vllm.checkpoint import WeightStore
from retrain.vllm.checks import START, ServerNeeds, check_server, wait_until_up
from retrain.vllm.client import AdapterSlots, Facts, VllmClient
from retrain.vllm.delivery import AdapterDelivery, Delivery, FolderDelivery
from retrain.vllm.fleet import ALL, Fleet, Member
from retrain.vllm.group import GroupDelivery
from retrain.vllm.options import VllmOptions, located
from retrain.vllm.publish import Publisher
from retrain.vllm.sampler import Seeds, VllmSampler
from retrain.vllm.server import Launch, VllmServer
from retrain.wire.refusals import RemoteError

T = TypeVar("T")
Kind = TypeVar("Kind", bound=VllmSampler)
LOG = "vllm-{number}.log"
"""The output of a server that the run starts, in the folder of its logs."""


@dataclass(frozen=True)
class Opening:
    """What the servers must serve, and what a run allows them."""

    folder: str
    """The model's, or its id on the Hub."""
    model: Any  # a PreTrainedModel, or PEFT's
    tokenizer: Tokenizer
    dtype: torch.dtype
    scratch: Path
    """A private folder."""
    logs: Path
    base_dir: Path = Path()
    """Relative paths of the options start here."""
    lora: AdapterSlots | None = None
    """The adapters that are published; None: all weights are."""
    service: bool = False
    """All weights are published even so, and requests may have seeds, which are sent; a server on
    the CPU rejects them."""
    tokens: int = 2
    """The context that the run needs at least."""
    outage_seconds: float = 600.0
    """Seconds that a request waits while no server is up."""
    publish_seconds: float = 1800.0
    """The limit of one server's update."""

    @property
    def limits(self) -> Limits:
        """The model's; a server may have a shorter context."""
        config = self.model.config.get_text_config()
        return Limits(getattr(config, "max_position_embeddings", None), int(config.vocab_size))


async def open_vllm(
    options: VllmOptions,
    opening: Opening,
    kind: type[Kind] = VllmSampler,  # type: ignore[assignment]  # type variables have no default
) -> Kind:
    """A sampler over checked servers, to which nothing is published yet.

    Raises ConfigError if a server doesn't fit, AdapterError if one can't be started or reached.
    """
    needs = ServerNeeds(
        options.way(lora=opening.lora is not None),
        opening.limits.vocabulary,
        opening.tokens,
        str(opening.dtype).removeprefix("torch."),
        opening.lora,
        opening.model.config.get_text_config().to_dict(),
    )
    async with AsyncExitStack() as stack:
        members = await _members(options, opening, stack)
        found = await _all([_checked(member, needs, opening.logs) for member in members])
        for member, facts in zip(members, found, strict=True):
            member.gate = Capacity(ALL) if facts.lora else None
        start = options.start_seconds or START
        fleet = Fleet(
            members,
            _publisher(options, opening),
            check=lambda client: check_server(client, needs),
            restarts=options.restarts,
            outage_seconds=max(opening.outage_seconds, start if options.python else 0.0),
        )
        sampler = kind(
            fleet,
            opening.tokenizer,
            _within(opening.limits, [facts.context for facts in found]),
            stop_ids=eos_ids(opening.model, opening.tokenizer),
            wants_lora=needs.way == "adapter" and not opening.service,
            seeds=_seeds(found) if opening.service else "ignore",
        )
        stack.pop_all()
    return sampler


async def _members(options: VllmOptions, opening: Opening, stack: AsyncExitStack) -> list[Member]:
    """The servers, all started or met at the same time; `stack` ends them."""
    processes = _processes(options, opening)
    for process in processes:
        stack.push_async_callback(process.close)
    try:
        urls = options.urls or await _all([process.start() for process in processes])
    except AdapterError as error:
        raise AdapterError(_with_kept_log(str(error), opening.logs)) from error
    clients = [await stack.enter_async_context(VllmClient(url)) for url in urls]
    await _all([wait_until_up(client, options.start_seconds) for client in clients])
    return [
        Member(number, client, processes[number] if processes else None)
        for number, client in enumerate(clients)
    ]


async def _checked(member: Member, needs: ServerNeeds, logs: Path) -> Facts:
    """As `check_server`; the error of a server of ours that failed or died quotes its log."""
    try:
        return await check_server(member.client, needs)
    except ConfigError as error:
        if member.process is None or not isinstance(error.__cause__, RemoteError):
            raise
        quoted = f"{error}. Its last lines:\n{member.process.last_lines()}"
        raise AdapterError(_with_kept_log(quoted, logs)) from error


def _with_kept_log(text: str, logs: Path) -> str:
    """`text` with the place of a copy of the log that it names.

    A run that fails before training begins removes its run directory, logs included.
    """
    for log in logs.glob(LOG.format(number="*")):
        if str(log) in text:
            kept = Path(tempfile.mkdtemp(prefix="retrain-")) / log.name
            shutil.copy(log, kept)
            text = text.replace(str(log), str(kept))
    return text


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _processes(options: VllmOptions, opening: Opening) -> list[VllmServer]:
    """The servers that the run starts, by their number."""
    if options.python is None:
        return []
    launch = Launch(
        located(options.python, opening.base_dir),
        opening.folder,
        str(opening.dtype).removeprefix("torch."),
        lora=opening.lora if options.way(lora=opening.lora is not None) == "adapter" else None,
        tensor_parallel=options.tensor_parallel,
        gpu_memory=options.gpu_memory,
        cpu=not torch.cuda.is_available(),
        args=options.args,
        seconds=options.start_seconds or START,
    )
    processes: list[VllmServer] = []
    for first in range(0, len(options.devices) or 1, options.tensor_parallel):
        number, last = len(processes), first + options.tensor_parallel
        folder = opening.scratch / f"vllm-{number}"
        folder.mkdir(exist_ok=True)
        own = replace(launch, devices=options.devices[first:last])
        log = opening.logs / LOG.format(number=number)
        processes.append(VllmServer(own, folder=folder, log=log))
    return processes


def _publisher(options: VllmOptions, opening: Opening) -> Publisher:
    folder = None if options.folder is None else located(options.folder, opening.base_dir)
    store = WeightStore(folder, opening.scratch)
    whole: Delivery = FolderDelivery(store, opening.folder, dtype=opening.dtype)
    if options.way(lora=opening.lora is not None) == "group":
        whole = GroupDelivery(opening.folder, dtype=opening.dtype)
    return Publisher(
        whole, AdapterDelivery(store), in_flight=options.in_flight, seconds=opening.publish_seconds
    )


def _within(limits: Limits, contexts: list[int]) -> Limits:
    """The model's limits, with the shortest context of the servers."""
    own = [] if limits.context_length is None else [limits.context_length]
    return replace(limits, context_length=min(contexts + own))


def _seeds(found: Sequence[Facts]) -> Seeds:
    return "reject" if any(one.cpu for one in found) else "send"
