"""A few hundred random requests; `python -m tests.chaos.requests` sends more."""

from __future__ import annotations

import pytest

from retrain.service.app import ServiceApp
from retrain.service.core import Service
from retrain.service.state import ServiceSettings
from retrain.service.tinker import TinkerProtocol
from retrain.service.weaver import WeaverProtocol
from tests.chaos import requests as requests_campaign
from tests.chaos.requests import BrokenRule, Fuzz, fuzz, requests


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
    async def leak(self: Service, *_: object) -> dict[str, float]:
        for model in self.models.values():
            if model.trainer is not None:
                next(iter(model.trainer._trained.values())).data += 1
        raise RuntimeError("it harms another's model")

    with monkeypatch.context() as patch:
        patch.setattr(requests_campaign, "BETWEEN_CHECKS", 10)
        made: list[Fuzz] = []

        class Planted(Fuzz):
            def __init__(self, url: str, app: ServiceApp, seed: int) -> None:
                super().__init__(url, app, seed)
                patch.setattr(Service, "optim_step", leak)
                made.append(self)

        patch.setattr(requests_campaign, "Fuzz", Planted)
        with pytest.raises(BrokenRule, match=r"the victim was changed|harms another's model"):
            fuzz(tmp_path, 300, seed=0)
        assert sum(made[0].statuses.values()) < 300
