"""Runs the tests in this process, and the program in a forked one that never has the tests.

The program's names are `Result` objects here: the tests call them with plain values and get plain
values, which they compare in this process. An object that the program returns instead has
attributes and can be called, but decides no comparison. The first line of the standard input is a
secret, the rest has the tests; each line of the standard output is the secret and a verdict.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import builtins
import ctypes
import json
import signal

from peer import METHODS, Ended, Peer, Remote  # type: ignore[import-not-found]
from subject import ProgramPeer  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
DIFFERENCE = ("__sub__", "__rsub__", "__truediv__", "__rtruediv__")
QUERIES = {name for kind in (str, bytes, tuple, frozenset, int, float) for name in dir(kind)}
"""Methods by which a test judges a plain value, such as `f(1).startswith("a")`."""
NAMES = ("__name__", "__qualname__", "__doc__", "__module__")
ITERATION = ("__iter__", "__next__", "__contains__", "__bool__")
FALSE, ENDED = "It is false.", "It ended."


class Fault(BaseException):
    """A test asks an object of the program for a judgement; not an Exception, as for `Ended`."""


class Result(Remote):  # type: ignore[misc]  # its module is imported in the sandbox
    """An object of the program.

    `_label_` is the expression that it comes from. Its operators work if `_made_`: a test that
    calls a class by its name, as in `Stack()`, expects an object. But a function may have such a
    name: how far the object is from a plain value, which may be the expected one, it can't say.
    """

    __doc__ = vars(Remote)["__doc__"]

    def __init__(self, peer: TestPeer, number: int, kind: str, base: str) -> None:
        Remote.__init__(self, peer, number, kind, base)
        self.__dict__.update(_label_=kind, _made_=False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For `isinstance`: a class of the program may derive from a built-in one."""
        return getattr(builtins, self._base_, Result)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # protocols, such as numpy's of memory
            raise AttributeError(name)
        value = Remote.__getattr__(self, name)
        if isinstance(value, Result):
            if name in QUERIES and not self._made_:
                raise self._peer_.fault(self)
            value.__dict__["_label_"] = f"{self._label_}.{name}"
        return value

    def __eq__(self, other: object) -> Any:
        if not self._base_:
            raise self._peer_.fault(self)
        if "_plain_" not in vars(self) or self._base_ in ("list", "dict", "set", "bytearray"):
            self.__dict__["_plain_"] = self._peer_.ask("plain", self._number_)
        return self._plain_ == other

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return str(self._peer_.special(self, "__str__"))

    def __repr__(self) -> str:
        return self._label_ if self._peer_.showing else str(self._peer_.special(self, "__repr__"))

    def __instancecheck__(self, value: Any) -> Any:
        return self._peer_.special(self, "__instancecheck__", value)

    def __enter__(self) -> Any:
        return self._peer_.special(self, "__enter__")

    def __exit__(self, *error: object) -> None:
        """The program can't suppress an exception of the test."""
        self._peer_.special(self, "__exit__", *error[:2], None)

    def _operate_(self, name: str, *arguments: Any) -> Any:
        results = [v for v in arguments if isinstance(v, Result)]
        if not all(v._made_ for v in (self, *results)):
            if name == "__len__":  # `list` asks for it as well, and permits a TypeError
                raise TypeError(f"{self._label_} is an object of the class {self._kind_}")
            raise self._peer_.fault(self)
        plain = len(results) < len(arguments)
        if plain and name in ORDER:
            raise self._peer_.fault(self)
        value = Remote._operate_(self, name, *arguments)
        if isinstance(value, Result):
            made = METHODS[name] and not (plain and name in DIFFERENCE[:2])
            value.__dict__.update(_label_=f"{self._label_}.{name}", _made_=made)
        elif plain and name in DIFFERENCE and value is not NotImplemented:
            raise self._peer_.fault(self)
        return value


class TestPeer(Peer):  # type: ignore[misc]
    """The process of the tests; nothing that the program sends is trusted."""

    remote = Result

    def __init__(self, read: int, write: int, program: int) -> None:
        super().__init__(read, write)
        self.program = program

    def verdict(self, source: str, names: list[str]) -> dict[str, str]:
        """What the model sees of a test: the last call, and why the test failed, if it did."""
        self.objects.clear()
        self.wrong, self.shown, self.showing = "", "", False
        self.arrays = "numpy" in source  # otherwise the test compares lists
        self.error: BaseException | None = None
        try:
            space = {"__name__": "tests", **self.names(names)}
            exec(compile(source, "tests", "exec", dont_inherit=True), space)
        except BaseException as error:  # noqa: BLE001 - also what ends a process
            known = error is self.error or isinstance(error, NameError)  # such as no function `f`
            self.wrong = self.wrong or (f"{type(error).__name__}: {error}" if known else FALSE)
        return {"call": self.shown, "wrong": self.wrong}

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program defines."""
        given = self.ask("names", 0, wanted)
        found = {name: given[name] for name in wanted if name in given}
        for name, value in found.items():
            if isinstance(value, Result):
                value.__dict__["_label_"] = name
        return found

    def fault(self, value: Result) -> Fault:
        """The test fails, even if it catches the exception."""
        text = f"{value._label_} is an object of the class {value._kind_}, expected a plain value."
        self.wrong = self.wrong or text
        return Fault()

    def call(self, remote: Result, arguments: tuple[Any, ...], keys: dict[str, Any]) -> Any:
        label = self.shown = self.shown_call(remote._label_, arguments, keys)
        value = super().call(remote, arguments, keys)
        if isinstance(value, Result):
            name = remote._label_.lstrip("_")
            made = name.isidentifier() and name[0].isupper()
            value.__dict__.update(_label_=label, _made_=made)
        return value

    def shown_call(self, label: str, arguments: tuple[Any, ...], keys: dict[str, Any]) -> str:
        self.showing = True
        given = [*map(repr, arguments), *(f"{k}={v!r}" for k, v in keys.items())]
        self.showing = False
        return f"{label}({', '.join(given)})"[:1000]

    def exchange(self, *request: Any) -> dict[str, Any]:
        if self.output.closed:
            raise self.ended()
        try:
            reply: dict[str, Any] = super().exchange(*request)
            sys.stdout.write(reply.get("printed", ""))
        except Ended:
            raise self.ended() from None
        except Exception:  # noqa: BLE001 - the program wrote something else to our channel
            raise self.ended(kill=True) from None
        self.stops = "__next__" in request
        return reply

    def read(self, reply: dict[str, Any]) -> tuple[Any, BaseException | None]:
        try:
            value, error = super().read(reply)
        except Exception:  # noqa: BLE001 - as above
            raise self.ended(kill=True) from None
        if isinstance(error, StopIteration) and not self.stops:  # it would end `all(map(...))`
            error = RuntimeError("the program raised StopIteration")
        self.error = error or self.error
        return value, error

    def ended(self, kill: bool = False) -> Ended:
        """All tests fail from here on."""
        if kill:
            os.kill(self.program, signal.SIGKILL)
        self.wrong = self.wrong or ENDED
        self.output.close()
        return Ended()

    def perform(self, operation: str, number: int, *given: Any) -> dict[str, Any]:
        """The program can call what a test passes, iterate over it, and use public attributes."""
        target = self.objects[number]
        name, own = str(given[0]), getattr(target, "__module__", "") == "tests"
        if operation == "special" and not (name in ITERATION or (own and name in METHODS)):
            raise TypeError(f"tests do not permit {name}")
        own = own if operation == "getattr" else type(target).__module__ == "tests"
        permitted = operation in ("call", "special") or (own and not name.startswith("_"))
        if not (permitted or (operation == "getattr" and name in NAMES)):
            raise AttributeError(f"tests do not permit {operation} {name}")
        try:
            return dict(super().perform(operation, number, *given))
        except AssertionError:  # of a function of the tests: the program may catch it
            self.wrong = self.wrong or FALSE
            raise AssertionError from None


def main() -> None:
    to_program, from_judge, to_judge, from_program = *reversed(os.pipe()), *reversed(os.pipe())
    dumpable(False)  # before there is a program, which could read our memory and descriptors
    program = os.fork()
    if program == 0:
        os.close(to_program)
        os.close(from_program)
        dumpable(True)
        ProgramPeer(from_judge, to_judge).serve()
    os.close(from_judge)
    os.close(to_judge)
    sys.path.remove(os.getcwd())  # the program can write there
    sys.path[:] = [path for path in sys.path if path]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    secret = sys.stdin.readline().strip()
    tests = json.load(sys.stdin)
    verdicts = os.dup(1)
    for output in (1, 2):  # what tests print may be the expected result
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    judge = TestPeer(from_program, to_program, program)
    for test in tests:
        line = json.dumps(judge.verdict(**test))
        os.write(verdicts, f"{secret} {line}\n".encode())
    judge.output.close()
    _, status = os.waitpid(program, 0)
    os.write(verdicts, f"{secret} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def dumpable(value: bool) -> None:
    """Whether processes of the same user may read this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, int(value), 0, 0, 0)


main()
