"""Jobs: the work that requests start, in which order it runs, and its results.

- A request with a number (`seq_id`) is one job: sent again it finds the same job, and with another
  body it is rejected (409). A client that lost a reply can therefore always send again.
- `Lane.submit(..., ordered=True)` runs jobs in the order of their numbers, 1, 2, 3, ..., whatever
  the order of arrival. A job behind a gap waits `gap_timeout` seconds for the missing number, then
  fails. A rejected request leaves no gap: `Lane.reject` lets later ones pass it.
- Finished jobs are kept while their results hold fewer than `KEPT` numbers in total, and until
  their session ends. The result of an older job is forgotten (410).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from retrain.service.errors import ServiceError, conflict, invalid

KEPT = 20_000_000
STOPPED = "the job was cancelled or the service is shutting down"
Work = Callable[[], Awaitable[Any]]
log = logging.getLogger(__name__)


class Owner(Protocol):
    """A session."""

    finished: bool


def _same(result: Any) -> Any:  # whatever the work returns
    return result


@dataclass(slots=True, eq=False)
class RequestJob:
    """One piece of work; `finished` is set once it has a `result` or an `error`."""

    kind: str
    """Its name in the protocol, for the encoding of its result."""
    size: int = 1
    """How many numbers its result holds, approximately."""
    show: Callable[[Any], Any] = _same
    """From what the work returns to the result in the protocol's form."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: Literal["waiting", "pending", "running", "done", "failed"] = "pending"
    """`waiting` for a request with a lower number; `pending` before it runs."""
    result: Any = None
    error: ServiceError | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the first reply, beside the id
    session: Owner | None = None
    """It is forgotten with this session."""
    protocol: object = None
    """What started it and knows the form of its result; the other protocol can't show it."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """What runs it."""

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether the job has finished."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.finished.wait()
        return self.finished.is_set()


class Jobs:
    """All jobs of a service, on one event loop."""

    def __init__(self) -> None:
        self._finished: OrderedDict[str, RequestJob] = OrderedDict()
        self._open: dict[str, RequestJob] = {}
        self._kept = self._forgotten = 0

    def get(self, job_id: str) -> RequestJob:
        """Raises ServiceError: 410 if it may be a forgotten job, else 404."""
        job = self._open.get(job_id) or self._finished.get(job_id)
        if job is None:
            status = 410 if self._forgotten else 404
            raise ServiceError(status, f"request {job_id} is unknown or expired")
        return job

    def add(self, job: RequestJob) -> RequestJob:
        """Register a job without starting it."""
        self._open[job.id] = job
        return job

    def start(self, job: RequestJob, work: Work) -> RequestJob:
        """Run it now, concurrently with the others."""
        self.add(job).state = "pending"
        job.task = asyncio.create_task(self._run(job, work), name=f"{job.kind} {job.id}")
        return job

    def forget(self, session: Owner) -> None:
        """Forget the finished jobs of a session."""
        for job in [one for one in self._finished.values() if one.session is session]:
            del self._finished[job.id]
            self._kept -= job.size
            self._forgotten += 1

    def fail(self, job: RequestJob, error: ServiceError) -> None:
        """Finish it with an error."""
        job.error = error
        self._finish(job, "failed")

    async def close(self) -> None:
        """Cancel running jobs and wake all waiters."""
        tasks = [job.task for job in self._open.values() if job.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in list(self._open.values()):
            self.fail(job, ServiceError(503, STOPPED))

    async def _run(self, job: RequestJob, work: Work) -> None:
        job.state = "running"
        try:
            job.result = job.show(await work())
        except asyncio.CancelledError:
            self.fail(job, ServiceError(503, STOPPED))
            raise
        except ServiceError as error:
            self.fail(job, error)
        except Exception as error:  # the waiting client must get every failure
            log.exception("%s %s failed", job.kind, job.id)
            self.fail(job, ServiceError(500, f"{type(error).__name__}: {error}"))
        else:
            self._finish(job, "done")

    def _finish(self, job: RequestJob, state: Literal["done", "failed"]) -> None:
        if job.finished.is_set():
            return
        job.state = state
        job.show = _same  # frees the rows of its request
        self._open.pop(job.id, None)
        if job.session is None or not job.session.finished:
            self._finished[job.id] = job
            self._kept += job.size
        while self._kept > KEPT and len(self._finished) > 1:
            _, oldest = self._finished.popitem(last=False)
            self._kept -= oldest.size
            self._forgotten += 1
        job.finished.set()


class Lane:
    """The numbered requests of one model or one sampling session."""

    def __init__(self, jobs: Jobs, gap_timeout: float = 300.0) -> None:
        self._jobs = jobs
        self._gap_timeout = gap_timeout
        self._known: dict[int, tuple[bytes, str]] = {}
        self._behind: dict[int, tuple[RequestJob, Work, asyncio.TimerHandle]] = {}
        self._rejected: set[int] = set()
        self._next = 1

    def submit(
        self, seq_id: int, body: bytes, job: RequestJob, work: Work, *, ordered: bool
    ) -> RequestJob:
        """The job of this number: `job`, or the one that was submitted before.

        Raises ServiceError (409) if the number was used for another request.
        """
        digest = hashlib.sha256(job.kind.encode() + b"\0" + body).digest()
        before, job_id = self._known.setdefault(seq_id, (digest, job.id))
        if before != digest:
            raise conflict(
                f"seq_id {seq_id} was already used for another request; use the next number"
            )
        if job_id != job.id:
            return self._jobs.get(job_id)
        if not ordered:
            return self._jobs.start(job, work)
        self._jobs.add(job).state = "waiting"
        timer = asyncio.get_running_loop().call_later(self._gap_timeout, self._give_up, seq_id)
        self._behind[seq_id] = job, work, timer
        self._rejected.discard(seq_id)
        self._advance()
        return job

    def reject(self, seq_id: int) -> None:
        """Don't wait for this number any more, whose request was rejected.

        A corrected request may still use it, until a later one runs.
        """
        if seq_id not in self._known:
            self._rejected.add(seq_id)
            self._advance()

    def _advance(self) -> None:
        """Start the jobs whose turn it is."""
        while (number := self._awaited()) in self._behind:
            for skipped in range(self._next, number):
                self._known[skipped] = b"", ""
                self._rejected.discard(skipped)
            self._next = number + 1
            job, work, timer = self._behind.pop(number)
            timer.cancel()
            self._jobs.start(job, work)

    def close(self) -> None:
        """Fail the jobs that still wait for a number."""
        for seq_id in list(self._behind):
            self._give_up(seq_id)

    def _give_up(self, seq_id: int) -> None:
        job, _, timer = self._behind.pop(seq_id)
        timer.cancel()
        message = f"seq_id {seq_id} waited for seq_id {self._awaited()}, which never arrived"
        self._jobs.fail(job, invalid(message))

    def _awaited(self) -> int:
        return next(n for n in itertools.count(self._next) if n not in self._rejected)
