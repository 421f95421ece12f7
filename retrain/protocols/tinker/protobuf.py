"""The protobuf wire format: fields in, fields out. No schema: wire.py knows the numbers.

Encoding leaves out proto3's defaults (0 and empty), as protobuf does, unless the caller builds the
field itself. Decoding skips nothing: the reader of a message ignores the fields that it doesn't
know. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

Value = int | bytes
"""A varint, a fixed64 or fixed32 as its little-endian bytes, or the bytes of the rest."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def integer(number: int, value: int) -> bytes:
    """An int32, int64, bool or enum field; empty when it is 0."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def double(number: int, value: float) -> bytes:
    """A double field; empty when it is +0.0."""
    packed = struct.pack("<d", value)
    return varint(number << 3 | FIXED64) + packed if any(packed) else b""


def text(number: int, value: str) -> bytes:
    """A string field; empty when it is ""."""
    return message(number, value.encode()) if value else b""


def message(number: int, body: bytes) -> bytes:
    """A submessage or bytes field, written even when it is empty."""
    return b"".join((varint(number << 3 | BYTES), varint(len(body)), body))


def packed(number: int, values: Iterable[int]) -> bytes:
    """A repeated integer field in packed form; empty when there is no value."""
    body = b"".join(map(varint, values))
    return message(number, body) if body else b""


def entry(number: int, key: str, value: bytes) -> bytes:
    """An entry of a map from strings; `value` is the encoded field 2."""
    return message(number, message(1, key.encode()) + value)


def varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; a negative number as its 64-bit two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Every field of a message: its number and value, in order.

    Raises ValueError when the bytes end too early or hold a wire type that proto3 lacks.
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"protobuf: field {number} has the wire type {kind}")
        if at + size > end:
            raise ValueError(f"protobuf: field {number} ends after the message does")
        yield number, data[at : at + size]
        at += size


def number_of(value: Value) -> int:
    """A varint's value; raises ValueError for another wire type."""
    if isinstance(value, int):
        return value
    raise ValueError("protobuf: got bytes, expected a varint")


def bytes_of(value: Value) -> bytes:
    """The bytes of a submessage, string or bytes field; raises ValueError for a varint."""
    if isinstance(value, bytes):
        return value
    raise ValueError("protobuf: got a varint, expected bytes")


def text_of(value: Value) -> str:
    """A string field's value."""
    return bytes_of(value).decode()


def double_of(value: Value) -> float:
    """A double field's value."""
    (number,) = struct.unpack("<d", bytes_of(value))
    return float(number)


def integers_of(value: Value) -> list[int]:
    """One occurrence of a repeated integer field, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _read_varint(value, at)
        found.append(number)
    return found


def entry_of(value: Value) -> tuple[str, Value | None]:
    """Key and value of a map entry; None where the value is the default, and so left out."""
    key, content = "", None
    for number, part in fields(bytes_of(value)):
        if number == 1:
            key = text_of(part)
        elif number == 2:
            content = part
    return key, content


def pack(code: str, values: Sequence[float]) -> bytes:
    """Little-endian bytes of `values`: code `i` int32, `q` int64, `f` float32.

    Raises OverflowError when an integer does not fit.
    """
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack(code: str, data: bytes) -> array[int] | array[float]:
    """The numbers of little-endian bytes; raises ValueError when the bytes don't divide."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        try:
            byte = data[at]
        except IndexError:
            raise ValueError("protobuf: the message ends within a number") from None
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("protobuf: a number is longer than 64 bits")
