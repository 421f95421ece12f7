"""Parts of the local sampler: draws, their random numbers, and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from retrain.engine.drawing import Drawer, Row, row_keys, uniforms
from retrain.engine.kv_cache import RowCache
from retrain.sampler import SamplingParams


class Only:
    """A mask of fixed tokens, which remembers what was drawn."""

    def __init__(self, *allowed: bool) -> None:
        self.mask, self.drawn = np.array(allowed), list[int]()

    def allowed(self) -> Any:
        return self.mask

    def drew(self, token: int) -> None:
        self.drawn.append(token)


def plain(key: int, mask: Sequence[bool] = (), **params: Any) -> Row:
    masked = Only(*mask) if mask else None
    return Row(params=SamplingParams(**params), key=key, top=4, mask=masked)


LOGITS = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8}, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        ({"top_k": 3, "top_p": 0.6}, [0, 2 / 3, 0, 1 / 3]),  # 0.5 / 0.9 = 0.56 alone is too little
        ({"temperature": 0.5}, [0.0225 / 0.345, 0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345]),
        ({"temperature": 0}, [0, 0.5, 0, 0]),
        ({"temperature": 0, "top_k": 3}, [0, 0.5, 0, 0]),
        ({"temperature": 1e-3, "top_k": 1}, [0, 1, 0, 0]),
        ({"mask": [True, True, False, True]}, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        ({"mask": [False, True, True]}, [0, 0.5 / 0.6, 0.1 / 0.6, 0]),  # fewer than the logits
        ({"mask": [True, True, True, False], "top_p": 0.7}, [0.15 / 0.65, 0.5 / 0.65, 0, 0]),
    ],
)
def test_draws_follow_the_restricted_distribution_and_report_it(
    params: dict[str, Any], expected: list[float]
) -> None:
    rows = [plain(key, **params) for key in row_keys(0, 20_000)]
    tokens, logprobs, tops = Drawer(rows, torch.device("cpu"))(LOGITS.expand(len(rows), -1))
    assert all(row.mask.drawn == [t] for row, t in zip(rows, tokens, strict=True) if row.mask)
    for token, logprob in set(zip(tokens, logprobs, strict=True)):
        assert np.exp(logprob) == pytest.approx(expected[token], rel=1e-5)
    shares = np.bincount(tokens, minlength=4) / len(rows)
    total = sum(expected)
    assert shares == pytest.approx([share / total for share in expected], abs=0.012)
    assert tops[0] is not None
    assert tops[0].ids[0] == 1
    if params.get("temperature") != 0:  # it reports the distribution at temperature 1
        shown = zip(tops[0].ids.tolist(), np.exp(tops[0].logprobs), strict=True)
        wanted = {token: share for token, share in enumerate(expected) if share}
        assert {t: share for t, share in shown if share} == pytest.approx(wanted, rel=1e-5)


def test_mixed_rows_draw_what_each_draws_alone() -> None:
    masked = {"mask": [True, False]}
    kinds: list[dict[str, Any]] = [{}, {"top_k": 2}, {"temperature": 0}, masked] * 4
    kinds += [{"top_p": 0.6}, {}, {**masked, "top_p": 0.6}, {}] * 4
    rows = [plain(key, **kind) for key, kind in zip(row_keys(1, 32), kinds, strict=True)]
    cpu = torch.device("cpu")
    together = Drawer(rows, cpu)(LOGITS.expand(32, -1))
    alone = [Drawer([row], cpu)(LOGITS[None]) for row in rows]
    assert together[0] == [one.tokens[0] for one in alone]
    assert together[1] == pytest.approx([one.logprobs[0] for one in alone])


def test_uniforms_are_splitmix64s() -> None:
    """The reference generator seeded with 1234567 gives these 64-bit numbers first."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + k * golden) % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert uniforms(states).tolist() == [(number >> 40) / 2**24 for number in known]


def test_uniforms_are_uniform_and_seeds_of_any_size_differ() -> None:
    drawn = uniforms(np.array(row_keys(0, 50_000), dtype=np.uint64))
    counts = np.bincount((drawn * 16).astype(int), minlength=16)
    assert counts == pytest.approx(50_000 / 16, rel=0.08)  # 4.6 standard deviations
    assert len({tuple(row_keys(seed, 2)) for seed in (0, 1, -1, 2**64 - 2, 2**70 + 3)}) == 5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_row_cache_holds_each_rows_own_keys_whatever_comes_and_goes(
    data: st.DataObject,
) -> None:
    cache, rows, numbers = RowCache(max_rows=8), [], iter(range(1, 10**9))

    def fresh(count: int) -> list[float]:
        return [float(next(numbers)) for _ in range(count)]

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "retain", "step", "step", "many steps"]))
        if action == "add":
            prompts = [fresh(n) for n in data.draw(st.lists(st.integers(1, 40), max_size=3))]
            sources = [
                i for i, _ in enumerate(prompts) for _ in range(data.draw(st.integers(0, 2)))
            ]
            if sources:
                longest = max(map(len, prompts))
                keys = torch.tensor([[0.0] * (longest - len(p)) + p for p in prompts])
                prefilled = DynamicCache()
                prefilled.update(keys[:, None, :, None], -keys[:, None, :, None], 0)
                cache.add(prefilled, sources, [len(prompts[i]) for i in sources])
                rows += [list(prompts[i]) for i in sources]
        elif action == "retain":
            kept = sorted(data.draw(st.sets(st.sampled_from(range(len(rows))))) if rows else [])
            order = data.draw(st.permutations(kept))
            if rows:
                cache.retain(order)
                rows = [rows[i] for i in order]
        elif rows:
            for _ in range(1 if action == "step" else 40):
                check_step(cache, rows, fresh(len(rows)))


def check_step(cache: RowCache, rows: list[list[float]], new: list[float]) -> None:
    inputs = cache.step_inputs()
    assert inputs["position_ids"].squeeze(1).tolist() == [len(row) for row in rows]
    states = torch.tensor(new)[:, None, None, None]
    keys, values = cache.update(states, -states, 0)
    cache.advance()
    assert torch.equal(values, -keys)
    assert keys.isfinite().all()
    width = keys.shape[2]
    mask = inputs.get("attention_mask", torch.ones(len(rows), width, dtype=torch.bool))
    assert mask.shape == (len(rows), width)
    for row, number, held, seen in zip(rows, new, keys[:, 0, :, 0], mask, strict=True):
        row.append(number)
        assert held[seen].tolist() == row
