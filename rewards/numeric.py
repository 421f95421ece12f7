"""1 if the completion's number is the answer, else 0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from retrain import RewardCalculator, Row, Trajectory

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"[eE][-+]?\d+|\s*(?:×|x|\*|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?[-+]?\d+\}?"
_NUMBER = re.compile(
    r"((?<![\w)\]}.])[-+])?\$?"
    rf"(?:\\[dt]?frac\{{({_DIGITS})\}}\{{({_DIGITS})\}}"
    rf"|({_DIGITS})({_POWER})?(?:\s*/\s*({_DIGITS}))?)(?:\s*(%))?"
)
_FRACTIONLESS = re.compile(r"[\d,]+(?:\.0+)?")
_LATEX = {"\\%": "%", "\\$": "$", "{,}": ",", "\\,": ",", "\\!": "", "−": "-"}
_LATEX |= {"^\\circ": "", "^{\\circ}": "", "^°": ""}
_EMPHASIS = re.compile(r"(?<!\w)(__?)([^_\s]+)\1(?!\w)")
_WITHIN = r"\s*(?:\{[^{}]*)?[-+]?$"
_UNIT = r"\d(?:,(?!\s))?[\s~$]*(?:\\[;: ]\s*)?(?:\\[a-z]+\s*\{\s*)?[^\W\d_]+(?:/[^\W\d_]+)?\}?\s*\^"
_NAMED = re.compile(rf"(?:(?<=[^\W_]|[)\]}}])_|{_UNIT}){_WITHIN}")
"""What makes a number the index of a name, or the exponent of a unit, as in 25 m^2."""
_BEFORE = re.compile(rf"(?:\^|√|\\sqrt(?:\[[^]]*\])?){_WITHIN}|\d\*\*[-+]?$")
_AFTER = re.compile(r"[)\]}]*\s*\^|\s*(?:√|\\sqrt)|_(?=[^\W_]|\{)|\*\*[-+]?\d")
"""What makes a number an exponent, a base or a part of a root: a value that is not calculated."""
_NEAR = 80
"""Characters before a number that are searched."""
TOLERANCE = 1e-9
Number = tuple[float, bool]
"""A value, which is an int if it is written as one, and whether it is in percent."""


class Numeric(RewardCalculator):
    """1 if the last number of the completion is the answer, else 0.

    Numbers may have a sign, thousands separators (1,234.5), a power of ten (1e3, 2 \\times 10^3), a
    fraction (3/4, \\frac{3}{4}) and a percent sign. A completion of "50%" matches both the answer
    50 and the answer 0.5. The answer is a number or a string, which is read in the same way.
    A number next to `^`, `_` or a root is not read, and no earlier number is the answer then; the
    exponents of units and the indices of names are ignored. Two integers must be equal unless a
    tolerance is set; other numbers must agree to 9 digits.

    Args:
        marker: Read the first number after the last occurrence of this string, such as "####", or
            the last one in the braces that follow it, as with `\\boxed`. A completion without the
            marker gets 0.
        absolute: The largest difference from the answer; 1e-9 by default.
        relative: The largest difference, as a fraction of the answer; 1e-9 by default.
    """

    needs_answer = True

    def __init__(
        self,
        marker: str | None = None,
        absolute: float | None = None,
        relative: float | None = None,
    ) -> None:
        self.exact = absolute is None and relative is None
        self.absolute, self.relative = (TOLERANCE if t is None else t for t in (absolute, relative))
        if marker == "" or not min(self.absolute, self.relative) >= 0:
            raise ValueError("expected a marker that is not empty, and tolerances >= 0")
        self.marker = marker

    def check_row(self, row: Row) -> None:
        if row.answer is not None:  # if no row has one, a warning says so
            self.right(row.answer)

    async def calculate(self, trajectory: Trajectory) -> float:
        right = self.right(trajectory.prompt.answer)
        said = number_in(trajectory.completion, self.marker)
        return float(said is not None and self.equal(said, right))

    def right(self, answer: object) -> Number:
        """The number of an answer; raises ValueError if it has none."""
        text = repr(answer) if isinstance(answer, float) else str(answer)
        right = number_in(text, self.marker if self.marker and self.marker in text else None)
        if right is None:
            raise ValueError(f"the prompt's answer is {text!r}, expected one with a number")
        return right

    def equal(self, said: Number, right: Number) -> bool:
        """Whether the numbers are equal; if one is in percent, as a hundredth too."""
        if self.exact and isinstance(said[0], int) and isinstance(right[0], int):
            return said[0] == right[0]
        scales = (1.0,) if said[1] == right[1] else (1.0, 0.01 if said[1] else 100.0)
        return any(
            math.isclose(said[0] * s, right[0], rel_tol=self.relative, abs_tol=self.absolute)
            for s in scales
        )


def number_in(text: str, marker: str | None = None) -> Number | None:
    """The number of a text, the last one or that of the marker."""
    if marker is None:
        return _last(text)
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    if rest.startswith("{"):
        return _last(_braced(rest))
    return next((number for number in _numbers(rest) if number), None)


def _last(text: str) -> Number | None:
    found = None
    for found in _numbers(text):  # noqa: B007 - the last one
        pass
    return found


def _braced(text: str) -> str:
    """The content of the braces that the text begins with; empty if they don't close."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index]
    return ""


def _numbers(text: str) -> Iterator[Number | None]:
    """The numbers of a text; None stands for one that has no value of its own, as in a root."""
    for latex, plain in _LATEX.items():
        text = text.replace(latex, plain)
    text = _EMPHASIS.sub(r"\2", text)
    for found in _NUMBER.finditer(text):
        near = text[max(0, found.start() - _NEAR) : found.start()]
        if _NAMED.search(near):
            continue
        part = _BEFORE.search(near) or _AFTER.match(text, found.end())
        yield None if part else _value(found)


def _value(found: re.Match[str]) -> Number | None:
    """The number that was found; None if it is not finite."""
    sign, above, below, digits, power, divisor, percent = found.groups("")
    value = _float(above or digits) * _power(power)
    under = _float(below or divisor or "1")
    if not under or not math.isfinite(value):
        return None
    if _FRACTIONLESS.fullmatch(digits) and not power + divisor + percent:
        value = int(digits.partition(".")[0].replace(",", ""))  # exact above 2**53 too
    else:
        value /= under
    return (-value if sign == "-" else value), bool(percent)


def _float(digits: str) -> float:
    return float(digits.replace(",", ""))


def _power(text: str) -> float:
    exponent = re.search(r"[-+]?\d+\}?$", text)
    return float(f"1e{exponent[0].rstrip('}')}") if exponent else 1.0
