"""Calls between the process of the tests and that of the program: one line of JSON per message.

Plain values travel by value. Any other object stays in its process; the other process gets a
`Remote`, whose operations are requests. While a process waits for a reply, it answers requests.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import sys
import types
from _thread import RLock
from collections import deque

TYPE_CHECKING = False  # `typing` takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

sys.set_int_max_str_digits(0)  # messages are text
MODULES = ("program", "tests")
"""The names of the two modules: their classes exist in one process only."""
DEPTH = 100
"""Levels of a nested value that travel together."""
STDLIB = sys.stdlib_module_names - {"unittest"}
"""Whose exceptions a program may raise in the tests; with SkipTest, it would skip them."""
BINARY = (
    "lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod "
    "pow rpow matmul rmatmul and rand or ror xor rxor"
)
UNARY = (
    "len bool int float index abs neg pos invert round reversed getitem setitem delitem "
    "contains instancecheck"
)
METHODS = {f"__{n}__": n in BINARY.split() for n in f"{BINARY} {UNARY}".split()}
"""Operators of a `Remote`, and whether they are binary; the process of the object applies them."""


class Ended(BaseException):
    """The other process ended; not an Exception, so that tests do not catch it."""


class Remote:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int, kind: str, base: str) -> None:
        self.__dict__.update(_peer_=peer, _number_=number, _kind_=kind, _base_=base)

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        return self._peer_.call(self, arguments, keys)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._peer_.ask("getattr", self._number_, "__doc__")

    def __getattr__(self, name: str) -> Any:
        return self._peer_.ask("getattr", self._number_, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer_.ask("setattr", self._number_, name, self._peer_.encode(value))

    def __iter__(self) -> Any:
        return self._peer_.special(self, "__iter__")

    def __next__(self) -> Any:
        return self._peer_.special(self, "__next__")

    def _operate_(self, name: str, *arguments: Any) -> Any:
        value = self._peer_.special(self, name, *arguments)
        if value is NotImplemented and not METHODS[name]:
            raise TypeError(f"{self._kind_} has no {name}")
        return value


for method in METHODS:
    setattr(Remote, method, lambda self, *given, name=method: self._operate_(name, *given))


class Peer:
    """One of the two processes: its channel, and its objects that the other one knows."""

    remote: type[Remote] = Remote
    arrays = True  # otherwise those of the other process are lists here

    def __init__(self, read: int, write: int) -> None:
        self.input, self.output = os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)
        self.objects: dict[int, Any] = {}
        self.lock = RLock()
        self.errors: dict[Any, type[BaseException]] = {}

    def ask(self, *request: Any) -> Any:
        """The value of the other process's reply; raises the exception of the reply."""
        value, error = self.read(self.exchange(*request))
        if error is not None:
            raise error
        return value

    def exchange(self, *request: Any) -> dict[str, Any]:
        """Send a request, and answer those of the other process until the reply arrives."""
        with self.lock:  # of the program's threads
            self.send(request)
            while not isinstance(message := self.receive(), dict):
                self.send(self.answer(message))
            return message

    def send(self, message: Any) -> None:
        try:
            self.output.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise Ended from None

    def receive(self) -> Any:
        if not (line := self.input.readline()):
            raise Ended
        return json.loads(line)

    def read(self, reply: dict[str, Any]) -> tuple[Any, BaseException | None]:
        if "raise" not in reply:
            return self.decode(reply["value"]), None
        return None, self.exception(*reply["raise"])

    def exception(self, names: Any, arguments: Any, state: Any, text: str) -> BaseException:
        """The exception that `raised` got."""
        kind, given = self.error_class(names), [*map(self.decode, arguments)]
        try:
            error = kind(*given)
        except Exception:  # noqa: BLE001 - its arguments are not those of its constructor
            error = kind.__new__(kind)
            error.args = tuple(given)
        error.__dict__.update(self.decode(state), _text_=text)
        return error

    def raised(self, error: BaseException, depth: int = 0) -> list[Any]:
        """The names of its classes, its arguments, its attributes, and its text."""
        names, deeper = _names(type(error)), depth + DEPTH // 4
        self.errors[json.dumps(names)] = type(error)
        try:
            arguments = [self.encode(argument, deeper) for argument in error.args]
            return [names, arguments, self.encode(vars(error), deeper), str(error)]
        except Exception:  # noqa: BLE001 - such as of its own `__str__`
            return [names, [], {"dict": []}, ""]

    def answer(self, request: list[Any]) -> dict[str, Any]:
        """The reply to a request."""
        try:
            return self.perform(*request)
        except BaseException as error:  # noqa: BLE001 - the other process gets it
            return {"raise": self.raised(error)}

    def perform(self, operation: str, number: int, *given: Any) -> dict[str, Any]:
        """Do what the other process asks for with an object of this one."""
        target = self.objects[number]
        if operation == "call":
            return self.called(target, *given)
        if operation == "getattr":
            return {"value": self.encode(getattr(target, given[0]))}
        if operation == "setattr":
            setattr(target, given[0], self.decode(given[1]))
            return {"value": None}
        if operation == "plain":
            return {"value": self.plain(target, 0)}
        name, *arguments = given
        function = BUILTIN_OF.get(name) or getattr(type(target), name, None)
        if function is None:
            return {"value": self.encode(NotImplemented)}
        return {"value": self.encode(function(target, *map(self.decode, arguments)))}

    def called(self, target: Any, arguments: list[Any], keys: dict[str, Any]) -> dict[str, Any]:
        """Call a function. The reply has the arguments that it changed, by their positions."""
        given = [self.decode(argument) for argument in arguments]
        mutable = {n: v for n, v in enumerate(given) if isinstance(v, MUTABLE)}
        before = {n: self.encode(v) for n, v in mutable.items()}
        value = target(*given, **{name: self.decode(value) for name, value in keys.items()})
        after = {n: self.encode(v) for n, v in mutable.items()}
        changed = [[n, v] for n, v in after.items() if v != before[n]]
        made = isinstance(target, type) and type(value).__module__ in MODULES
        return {"value": self.exported(value) if made else self.encode(value), "changed": changed}

    def call(self, remote: Remote, arguments: tuple[Any, ...], keys: dict[str, Any]) -> Any:
        encoded = {name: self.encode(value) for name, value in keys.items()}
        reply = self.exchange("call", remote._number_, [self.encode(a) for a in arguments], encoded)
        value, error = self.read(reply)
        if error is not None:
            raise error
        for position, new in reply.get("changed", ()):
            _change(arguments[position], self.decode(new))
        return value

    def special(self, remote: Remote, name: str, *arguments: Any) -> Any:
        """An operation that Python finds by the class, such as `len` or `+`."""
        return self.ask("special", remote._number_, name, *map(self.encode, arguments))

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON."""
        kind = type(value)
        if value is None or kind in (str, bool, int):
            return value
        if isinstance(value, Remote):
            return {"yours": value._number_}
        if (copy := self.copied(value, depth)) is not None:
            return copy
        if isinstance(value, PLAIN) and depth <= DEPTH:
            return self.derived(value, depth)
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            plain, form = self.encode(value.tolist(), depth + 1), value.dtype
            return {"array": [plain, form.str]} if value.ndim and form.kind in "biufc" else plain
        return self.constant(value) or self.exported(value)

    def derived(self, value: Any, depth: int) -> Any:
        """A value of a built-in class; one of a subclass goes with its other attributes."""
        kind, reference = type(value), getattr(value, "__dict__", {}).get("_remote_")
        if reference is not None:
            return self.encode(reference)
        plain = self.plain(value, depth)
        own = kind not in ENCODERS and kind.__module__ != "numpy"
        return {"named": [plain, *self.exported(value)["mine"]]} if own else plain

    def copied(self, value: Any, depth: int) -> dict[str, Any] | None:
        """What the other process makes a copy of, or a coroutine."""
        module, name = type(value).__module__, type(value).__name__
        if isinstance(value, BaseException) and depth <= DEPTH - DEPTH // 4:
            return {"raised": self.raised(value, depth)}
        if isinstance(value, types.CoroutineType):
            return {"awaited": self.exported(value)["mine"][0]}
        if name not in VALUES.get(module, ()):
            return None
        made = [list(value), value.maxlen] if name == "deque" else value.__reduce__()[1]
        return {"made": [module, name, [self.encode(argument, depth + 1) for argument in made]]}

    def constant(self, value: Any) -> dict[str, Any] | None:
        """The name of an exception, or of what else is built in."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": _names(value)}
        name = getattr(value, "__name__", "NotImplemented")
        known = isinstance(name, str) and getattr(builtins, name, None) is value
        return {"builtin": name} if known else None

    def plain(self, value: Any, depth: int) -> Any:
        """The value of a built-in type, or of a subclass."""
        encoded = next(ENCODERS[kind] for kind in ENCODERS if isinstance(value, kind))
        return encoded(self, value, depth + 1)

    def exported(self, value: Any) -> dict[str, Any]:
        self.objects[id(value)] = value
        kind = type(value)
        base = next((base.__name__ for base in ENCODERS if issubclass(kind, base)), "")
        return {"mine": [id(value), kind.__name__, base]}

    def decode(self, value: Any) -> Any:
        """What `encode` got; raises an exception for anything else."""
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("a list has no type")
            return value
        ((kind, inner),) = value.items()
        if kind in SEQUENCES:
            decode = self.decode
            return SEQUENCES[kind]([decode(v) if type(v) is dict else v for v in inner])
        return DECODERS[kind](self, inner)

    def builtin(self, name: str) -> Any:
        found = getattr(builtins, name)
        if found is NotImplemented or isinstance(found, type):
            return found
        raise ValueError(f"{name} is no type")

    def array(self, values: Any, kind: str) -> Any:
        if not self.arrays:
            return self.decode(values)
        import numpy  # the other process has it

        return numpy.array(self.decode(values), dtype=kind)

    def made(self, module: str, name: str, arguments: list[Any]) -> Any:
        if name not in VALUES[module]:
            raise ValueError(f"{module}.{name} is no value")
        return getattr(__import__(module), name)(*map(self.decode, arguments))

    async def awaited(self, number: int) -> Any:
        """A coroutine of the other process, which runs to its end when it is awaited."""
        return self.ask("special", number, "__await__")

    def named(self, given: Any, number: int, name: str, base: str) -> Any:
        """A plain value whose other attributes are remote, such as a named tuple."""
        plain = self.decode(given)
        made: Any = type(str(name), (type(plain),), {"__getattr__": _remote_attribute})(plain)
        made._remote_ = self.remote(self, number, name, base)
        return made

    def error_class(self, names: list[list[str]]) -> type[BaseException]:
        """The exception of a module and a name, followed by those of its base classes."""
        (module, name), *bases = names
        if module in MODULES:
            if (key := json.dumps(names)) not in self.errors:
                space = {"__module__": module, "__str__": _text}
                self.errors[key] = type(name, (self.error_class(bases),), space)
            return self.errors[key]
        known = module.partition(".")[0] in STDLIB
        found = getattr(sys.modules.get(module), name, None) if known else None
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        return self.error_class(bases)


def _remote_attribute(value: Any, name: str) -> Any:
    if name.startswith("__") or "_remote_" not in vars(value):
        raise AttributeError(name)
    return getattr(value._remote_, name)


def _names(kind: type) -> list[list[str]]:
    return [[base.__module__, base.__name__] for base in kind.__mro__[:-1]]


def _text(error: Any) -> str:
    return str(vars(error).get("_text_") or BaseException.__str__(error))


def _change(argument: Any, new: Any) -> None:
    """Repeat what a call did to a mutable argument."""
    argument.clear()
    (argument.extend if hasattr(argument, "extend") else argument.update)(new)


def _items(kind: str) -> Any:
    return lambda peer, value, depth: {kind: [peer.encode(item, depth) for item in value]}


BUILTIN_OF: dict[str, Any] = {
    f"__{function.__name__}__": function
    for function in (bool, int, float, str, repr, len, iter, next)
} | {
    "__contains__": lambda container, item: item in container,
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__await__": lambda coroutine: __import__("asyncio").run(coroutine),
}
"""Operations that have a meaning for classes without the method of this name."""
ENCODERS: dict[type, Any] = {
    int: lambda _, value, __: int(value),
    str: lambda _, value, __: str(value),
    float: lambda _, value, __: float(value) if math.isfinite(value) else {"float": repr(value)},
    complex: lambda _, value, __: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda _, value, __: {"bytes": bytes(value).hex()},
    bytearray: lambda _, value, __: {"bytearray": bytes(value).hex()},
    **{
        kind: lambda _, value, __: {type(value).__name__: [value.start, value.stop, value.step]}
        for kind in (range, slice)
    },
    dict: lambda peer, value, depth: {
        "dict": [[peer.encode(k, depth), peer.encode(v, depth)] for k, v in value.items()]
    },
    **{kind: _items(kind.__name__) for kind in (list, tuple, set, frozenset)},
}
PLAIN = tuple(ENCODERS)
MUTABLE = (list, dict, set, bytearray, deque)
VALUES: dict[str, Any] = {
    "collections": ("Counter", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
}
"""Classes whose instances travel as the arguments that make an equal one."""
SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
DECODERS: dict[str, Any] = {
    "float": lambda _, inner: {"inf": math.inf, "-inf": -math.inf}.get(inner, math.nan),
    "complex": lambda _, inner: complex(float(inner[0]), float(inner[1])),
    "bytes": lambda _, inner: bytes.fromhex(inner),
    "bytearray": lambda _, inner: bytearray.fromhex(inner),
    "range": lambda _, inner: range(*inner),
    "slice": lambda _, inner: slice(*inner),
    "dict": lambda peer, inner: {peer.decode(k): peer.decode(v) for k, v in inner},
    "array": lambda peer, inner: peer.array(*inner),
    "yours": lambda peer, inner: peer.objects[inner],
    "mine": lambda peer, inner: peer.remote(peer, *inner),
    "named": lambda peer, inner: peer.named(*inner),
    "builtin": lambda peer, inner: peer.builtin(inner),
    "error": lambda peer, inner: peer.error_class(inner),
    "raised": lambda peer, inner: peer.exception(*inner),
    "made": lambda peer, inner: peer.made(*inner),
    "awaited": lambda peer, inner: peer.awaited(inner),
}
