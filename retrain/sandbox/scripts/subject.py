"""The process of the program: it never has the tests, only the values that they pass."""

from __future__ import annotations

import io
import os
import sys
import types

from peer import Ended, Peer, Remote  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ProgramPeer(Peer):  # type: ignore[misc]  # its module is imported in the sandbox
    """Executes the program and answers the requests of the judge."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self.known: dict[int, Remote] = {}
        self.module = types.ModuleType("program")
        sys.modules["program"] = self.module

    def serve(self) -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # its standard output has the verdicts
        printed = io.BytesIO()
        # A reference: `printed` closes with it, even if the program sets another `sys.stdout`.
        self.stdout = sys.stdout = io.TextIOWrapper(printed, "utf-8", "replace", write_through=True)
        with open("program", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "program", "exec", dont_inherit=True), self.module.__dict__)
        try:
            while True:
                reply = self.answer(self.receive())
                self.send({**reply, "printed": printed.getvalue().decode("utf-8", "replace")})
                printed.seek(0)
                printed.truncate()
        except Ended:
            os._exit(0)  # what the program registered for its end does not run

    def perform(self, operation: str, number: int, *given: Any) -> dict[str, Any]:
        if operation != "names":
            return dict(super().perform(operation, number, *given))
        self.objects.clear()
        self.known.clear()
        names = {name: self.module.__dict__.get(name, sys) for name in given[0]}
        found = {n: v for n, v in names.items() if not isinstance(v, types.ModuleType)}
        return {"value": self.encode(found)}

    def remote(self, peer: Peer, number: int, kind: str, base: str) -> Remote:
        """The same object for the same number, so that a program can compare with `is`."""
        return self.known.setdefault(number, Remote(peer, number, kind, base))

    def builtin(self, name: str) -> Any:
        return getattr(__import__("builtins"), name)
