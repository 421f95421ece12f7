"""A few hundred random requests; `python -m tests.chaos.requests` sends more."""

from __future__ import annotations

import pytest

from retrain.service.core import Service
from retrain.service.state import Model, ServiceSettings
from retrain.service.tinker import TinkerProtocol
from retrain.service.weaver import WeaverProtocol
from retrain.wire.training import AdamParams
from tests.chaos import requests as requests_campaign
from tests.chaos.requests import BrokenRule, fuzz, requests


def test_p14_random_requests_harm_nobody(tmp_path):
    statuses = fuzz(tmp_path, 300, seed=0)
    assert statuses["200"] > 30
    assert statuses["400"] > 60
    assert statuses["413"] > 3


def test_the_random_requests_cover_every_route(tmp_path):
    service = Service(ServiceSettings(folder=tmp_path))
    tables = TinkerProtocol(service).table(), WeaverProtocol(service).table()
    ids = dict.fromkeys(
        ("session", "model", "sampler", "weaver_session", "weaver_model", "weaver_sampler", "job"),
        "x",
    )
    assert set(requests(ids, 1)) == set().union(*tables)


def test_a_broken_rule_is_noticed(tmp_path, monkeypatch):
    honest = Service.optim_step

    async def leak(self: Service, model: Model, adam: AdamParams) -> dict[str, float]:
        for other in self.models.values():
            if other is not model and other.trainer is not None:
                next(iter(other.trainer._trained.values())).data += 1
        return await honest(self, model, adam)

    monkeypatch.setattr(Service, "optim_step", leak)
    monkeypatch.setattr(requests_campaign, "BETWEEN_CHECKS", 10)
    with pytest.raises(BrokenRule, match="the victim was changed"):
        fuzz(tmp_path, 300, seed=0)
