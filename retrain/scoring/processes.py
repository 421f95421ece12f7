"""A reward in worker processes, `processes: N`.

Each worker scores one rollout at a time (one group, if the calculator compares rollouts). One that
dies, or exceeds the deadline, costs that rollout and is replaced: no code in it, not even a call
that holds the interpreter's lock or a segmentation fault, affects the run.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.config import DeadlinesConfig, RewardConfig
from retrain.config.plugins import LOCAL, user_packages
from retrain.errors import LIBRARIES, LateError, PluginError, UserCodeError
from retrain.scoring.base import FunctionReward, RewardCalculator
from retrain.scoring.calls import compares, together
from retrain.scoring.wire import Judged, NotAFrame, decoded, framed, read_frame
from retrain.supervision.children import Child
from retrain.types import Trajectory

MAIN = "retrain.scoring.worker"
LAST_WORDS_SECONDS = 1.0
"""How long a worker may take to write where it is, and to end."""
_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')


class ProcessReward(RewardCalculator):
    """Runs a calculator in `section.processes` processes. Each sets it up and closes it.

    Raises PluginError when the section can't be sent to another process.
    """

    def __init__(
        self,
        name: str,
        inner: RewardCalculator,
        section: RewardConfig,
        where: str,
        base_dir: Path,
        deadlines: DeadlinesConfig,
    ) -> None:
        """`inner` is the same calculator in this process: it is asked, but calculates nothing."""
        assert section.processes is not None
        if ":" in section.type and LOCAL.search(section.type):
            raise PluginError(
                f"{where}.processes: a worker process can't load {section.type}; move the reward "
                "into a file"
            )
        spec = {"name": name, "section": section, "where": where, "base_dir": base_dir}
        try:
            pickle.dumps(spec)
        except Exception as error:
            raise PluginError(
                f"{where}: its keys can't be sent to a worker process ({error}); remove "
                f"{where}.processes, or use plain values"
            ) from error
        self.name, self.inner = name, inner
        self.needs_answer, self.after = inner.needs_answer, inner.after
        self._workers = [_Worker(name, spec, deadlines) for _ in range(section.processes)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    def check_group(self, size: int) -> None:
        self.inner.check_group(size)

    async def setup(self) -> None:
        """Start all workers; raises the error of one that can't import or set up the reward."""
        results = await asyncio.gather(*(w.start() for w in self._workers), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def close(self) -> None:
        """Close the reward in each worker, and end the worker."""
        errors = await together([worker.close() for worker in self._workers])
        for error in filter(None, errors):
            raise error

    async def calculate(self, trajectory: Trajectory) -> Any:
        [verdict] = await self.verdicts([trajectory])
        if isinstance(verdict, UserCodeError):
            raise verdict
        return verdict

    async def verdicts(self, trajectories: Sequence[Trajectory]) -> list[Judged]:
        """One verdict or error per trajectory. The deadline starts once a worker is free."""
        if compares(self.inner):
            return await self._ask(list(trajectories), len(trajectories))
        if isinstance(self.inner, FunctionReward):  # only what the function declares is sent
            asked: list[Any] = [self.inner.arguments(trajectory) for trajectory in trajectories]
        else:
            asked = [[trajectory] for trajectory in trajectories]
        answers = await together([self._ask(one, 1) for one in asked])
        return [verdict for answer in answers for verdict in answer]

    async def _ask(self, asked: Any, count: int) -> list[Judged]:
        worker = await self._free.get()  # first come, first served
        try:
            verdicts = await worker.ask(asked)
        except UserCodeError as error:
            verdicts = [error]
        finally:
            self._free.put_nowait(worker)
        return verdicts if len(verdicts) == count else verdicts * count  # one error for all


class _Worker:
    """One worker process, started again by the call after the one that it died in."""

    def __init__(self, name: str, spec: dict[str, Any], deadlines: DeadlinesConfig) -> None:
        self._owner = f"reward '{name}'"
        self._spec, self._deadlines = spec, deadlines
        self._child: Child | None = None

    async def start(self) -> None:
        """Start the process and set up the reward in it. Raises UserCodeError or LateError."""
        self._child = await Child.start([sys.executable, "-c", _script()])
        spec = pickle.dumps({**self._spec, "packages": user_packages()})
        [answer] = await self._exchange(spec, self._deadlines.setup, "setup")
        if isinstance(answer, UserCodeError):
            await self._end()
            raise answer

    async def ask(self, asked: Any) -> list[Judged]:
        """The verdicts of a rollout or a group. Raises UserCodeError or LateError."""
        try:
            request = pickle.dumps(asked, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserCodeError(
                f"{self._owner}: the rollout can't be sent to a worker process: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._child is None:
            await self.start()
        return await self._exchange(request, self._deadlines.reward, "reward")

    async def close(self) -> UserCodeError | None:
        """Close the reward and end the process; returns what went wrong."""
        if self._child is None:
            return None
        try:
            [answer] = await self._exchange(b"", self._deadlines.close, "close")
        except UserCodeError as error:
            return error
        finally:
            await self._end()
        return answer if isinstance(answer, UserCodeError) else None

    async def _exchange(self, request: bytes, seconds: float, key: str) -> list[Judged]:
        """Send a request and read the answer; whatever goes wrong ends the process."""
        child = self._child
        assert child is not None
        try:
            async with asyncio.timeout(seconds):
                child.stdin.write(framed(request))
                await child.stdin.drain()
                return decoded(await read_frame(child.stdout))
        except TimeoutError:
            child.signal(signal.SIGABRT)  # faulthandler writes the stack, GIL or not
            where = await self._last_words(child)
            raise LateError(
                f"{self._owner} took longer than deadlines.{key} = {seconds} s{where}; its worker "
                "process was killed"
            ) from None
        except (EOFError, OSError, NotAFrame, ValueError) as error:
            where = await self._last_words(child, *error.args[:1])
            raise UserCodeError(
                f"{self._owner}: its worker process ended with {child.how_ended}{where}"
            ) from None
        except (asyncio.CancelledError, Exception):
            await self._end()
            raise

    async def _last_words(self, child: Child, head: Any = b"") -> str:
        """End the process; returns " at file:line" if its stack says where it was."""
        words = head if isinstance(head, bytes) else b""
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                while block := await child.stdout.read(2**16):
                    words += block
                await child.exited()
        except TimeoutError:
            pass  # the rest is lost
        finally:
            await self._end()
        frames = _FRAME.findall(words.decode(errors="replace"))
        own = [frame for frame in frames if not frame[0].startswith(LIBRARIES)] or frames
        return f" at {Path(own[0][0]).name}:{own[0][1]}" if own else ""

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


def _script() -> str:
    """The worker's program: it imports from where this process does."""
    return f"import sys; sys.path[:] = {sys.path!r}; from {MAIN} import main; main()"
