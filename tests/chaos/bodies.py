"""Random bodies of requests: broken values, mutations of valid bodies, and garbage."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import zstandard

from retrain.wire.tinker import messages
from retrain.wire.tinker.values import Datum, ForwardBackward, Tensor
from tests.service_kit import TOKENS

RAW = {"@deep@": "[" * 100_000 + "]" * 100_000, "@nested@": '{"a":' * 500 + "1" + "}" * 500}
"""Strings of a mutated body that are replaced by JSON that can't be written otherwise."""
RAW |= {"@infinite@": "1e999", "@nan@": "NaN", "@digits@": "9" * 5000, "@half@": '"\\ud800"'}
_NUMBERS = [0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 2**64, 10**19, 10**400, -(10**400)]
_REALS = [0.5, -0.0, 1e-40, 1e-300, 1e300, 3.5e38, -1e39]
_TEXTS = ["", "a", "x" * 5000, "../..", "tiny", "weights", "\x00", "é\u2028", ".", "a/b"]
_NAMES = ["tinker://", "weaver://a/b", "tinker://a/weights/b", "int64", "float32", "ppo", "gspo"]
_LISTS = [[], [[]], [None], [0], [-1], [10**30], [0.5], ["x"], [{}], [[1, 2]], [5, 10**9]]
_LARGE = [[1] * 2000, [[]] * 5000, {str(number): 0 for number in range(2000)}]
NASTY: list[Any] = [None, True, False, {}, {"a": 1}, *_NUMBERS, *_REALS, *_TEXTS, *_NAMES]  # JSON
NASTY += [*_LISTS, *_LARGE, *RAW]


def nasty(draw: random.Random) -> Any:  # JSON
    return copy.deepcopy(draw.choice(NASTY))


def mutated(body: Any, draw: random.Random) -> Any:  # JSON
    """A copy with one to three values replaced, removed, repeated or added."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(body))
        if not places:
            return nasty(draw)
        parent, key = draw.choice(places)
        change = draw.random()
        if change < 0.7:
            parent[key] = nasty(draw)
        elif change < 0.85:
            del parent[key]
        elif isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[draw.choice(["stop", "beta", "type", "shape", "x", "top_k"])] = draw.choice(
                NASTY
            )
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def written(body: Any) -> bytes:  # JSON
    text = json.dumps(body)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def protobuf(ids: Mapping[str, str], number: int, draw: random.Random) -> bytes:
    """A forward_backward request, most often with some bytes changed."""
    inputs = {
        "target_tokens": Tensor(TOKENS[1:], "int64"),
        "logprobs": Tensor([draw.choice([-1.0, float("nan"), float("inf"), 3e38])] * 5),
        "advantages": Tensor([1.0] * 5, sparse=draw.choice([None, ([0, 5], [0] * 5)])),
    }
    sent = ForwardBackward(ids["model"], number, [Datum(TOKENS[:-1], inputs)] * 2, "ppo")
    body = bytearray(messages.encode_request(sent))
    for _ in range(draw.choice([0, 1, 1, 5])):
        at = draw.randrange(len(body))
        match draw.randrange(4):
            case 0:
                body[at] = draw.randrange(256)
            case 1:
                del body[at:]
                body += b"\x1a\x00"
            case 2:
                body[at:at] = struct.pack("<q", draw.choice([-1, 2**62, 7]))
            case _:
                body += b"\x1a\x00" * draw.choice([1, 1000, 300_000])
    return bytes(body)


def garbage(draw: random.Random) -> bytes:
    return draw.choice(
        [
            b"",
            draw.randbytes(draw.choice([1, 50, 5000])),
            b"[" * 200_000,
            b"[" + b"[]," * 300_000 + b"[]]",
            b"[" + b"1," * 600_000 + b"1]",
            b'{"a":' * 100_000,
            b"\xff\xfe{\x00}\x00",
            b'{"seq_id": 1e5, "seq_id": NaN}',
            b'"' + b"x" * 1_000_000 + b'"',
            bytes(5 * 2**20),
        ]
    )


@cache
def bombs() -> list[bytes]:
    """Small bodies of zstd that stand for much."""
    plain = [bytes(2**27), b"[" + b"[]," * 2**24 + b"[]]", b"1" * 2**22]
    return [*map(zstandard.compress, plain), b"no zstd"]
