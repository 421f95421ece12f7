"""How the program ends: the exit code of every error, and the tasks that are left."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from retrain.cli.process import drive, exit_code
from retrain.errors import ConfigError, RunError


class Mute(Exception):
    def __str__(self) -> str:
        return str(1 / 0)


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a", "b", source="x.yaml"), 2, "error: x.yaml: 2 problems\n  a\n  b\n"),
        (RunError("the backend is gone"), 1, "error: the backend is gone\n"),
        (ExceptionGroup("g", [RunError("inner")]), 1, "error: inner\n"),
        (
            ExceptionGroup("g", [*(RunError(f"prompt {n}.0.0") for n in range(3)), RunError("x")]),
            1,
            "error: prompt 0.0.0 (and 2 more like it)\nerror: x\n",
        ),
        (ExceptionGroup("g", [RunError("x"), ConfigError("y")]), 2, "error: x\nerror: y\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (asyncio.CancelledError(), 130, "interrupted\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "interrupted\n"),
        (BaseExceptionGroup("g", [asyncio.CancelledError()]), 130, "interrupted\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), RunError("x")]), 1, "error: x\n"),
        (BaseExceptionGroup("g", [asyncio.CancelledError(), ConfigError("y")]), 2, "error: y\n"),
        (Mute("x"), 1, "error: Mute: <its __str__ raised ZeroDivisionError>"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: raising(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(message) if isinstance(error, Mute) else err == message


def test_the_traceback_of_the_unforeseen_goes_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("odd")
    error.add_note("in the callback Printer")
    assert exit_code(lambda: raising(error), [tmp_path]) == 1
    output = capsys.readouterr().err
    here = f"{__file__}:{raising.__code__.co_firstlineno + 1}"
    assert output.startswith(f"error: ValueError: odd at {here}\n  in the callback Printer\n")
    assert "Traceback" not in output
    assert "ValueError" in (tmp_path / "error.txt").read_text()
    for unforeseen in (error, BaseExceptionGroup("g", [GeneratorExit()])):
        assert exit_code(lambda e=unforeseen: raising(e)) == 1
        assert "Traceback" in capsys.readouterr().err


def test_drive_ends_what_is_left_and_restores_the_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.cli.process.STUCK_SECONDS", 0.05)
    ended = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def generator() -> AsyncIterator[int]:
        try:
            yield 5
        finally:
            await endless()

    numbers = generator()

    async def leaves_a_task() -> int:
        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        assert not task.done()
        return await anext(numbers)

    before = signal.getsignal(signal.SIGINT)
    assert drive(leaves_a_task()) == 5
    assert ended == [True, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_drive_gives_a_run_its_end_after_a_keyboard_interrupt_of_user_code() -> None:
    ended = []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def ends_slowly() -> None:
        other = asyncio.create_task(interrupted())
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(isinstance(other.exception(), KeyboardInterrupt))

    with pytest.raises(asyncio.CancelledError):  # the task was not the run's: a usual interrupt
        drive(ends_slowly())
    assert ended == [True]


def test_drive_works_outside_the_main_thread() -> None:
    async def answer() -> int:
        return 5

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(drive(answer())))
    thread.start()
    thread.join()
    assert found == [5]
