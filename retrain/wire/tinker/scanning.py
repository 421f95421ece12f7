"""A look at the bytes of a protobuf request before they are decoded.

An empty message takes 2 bytes on the wire and about 50 times as much in memory, so that the parts
are counted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_INNER: Mapping[str, Mapping[int, str]] = {
    "Request": {3: "Datum", 5: "Entry", 7: "Entry"},
    "Entry": {2: "Leaf"},
    "Datum": {1: "Chunk", 2: "Input"},
    "Input": {2: "Tensor"},
    "Tensor": {2: "Leaf"},
    "Chunk": {1: "Leaf"},
    "Leaf": {},
}
"""By message, the fields that hold messages; `messages._SCHEMA` has the rest."""
_SHAPE = 4
_LONGEST_SHAPE = 32


def count_fields(body: bytes, most: int) -> int:
    """How many fields a forward_backward request has, in all its messages; stops above `most`.

    Raises ValueError on bytes that aren't protobuf, or on a tensor with a long shape.
    """
    count = 0
    open_parts = [("Request", 0, len(body))]
    while open_parts and count <= most:
        kind, start, end = open_parts.pop()
        inner = _INNER[kind]
        for number, wire, first, last in _fields(body, start, end):
            count += 1
            if count > most:
                break
            if wire == 2 and number in inner:
                open_parts.append((inner[number], first, last))
            elif kind == "Tensor" and number == _SHAPE and last - first > _LONGEST_SHAPE:
                raise ValueError("a tensor has too many dimensions")
    return count


def address(body: bytes) -> tuple[str, int] | None:
    """The model and number that a request names; None if they can't be read."""
    model_id, seq_id = "", 0
    try:
        for position, (number, wire, first, last) in enumerate(_fields(body, 0, len(body))):
            if (number, wire) == (1, 2):
                model_id = body[first:last].decode()
            elif (number, wire) == (2, 0):
                seq_id = _varint(body, first, last)[0]
            if (model_id and seq_id) or position > 8:
                break
    except ValueError:
        return None
    return (model_id, seq_id) if model_id and seq_id else None


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The number, wire type and range of bytes of each field of a message."""
    while at < end:
        tag, at = _varint(body, at, end)
        wire = tag & 7
        if wire == 2:
            length, at = _varint(body, at, end)
        elif wire == 0:
            length = _varint(body, at, end)[1] - at
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"not a protobuf message of Tinker's: wire type {wire}")
        if at + length > end:
            raise ValueError("not a protobuf message of Tinker's: it is truncated")
        yield tag >> 3, wire, at, at + length
        at += length


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("not a protobuf message of Tinker's: it is truncated")
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("not a protobuf message of Tinker's: a number is too long")
