"""Licences and known vulnerabilities of the dependencies, as `make check` sees them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import retrain

ROOT = Path(retrain.__file__).resolve().parent.parent
LICENCES = runpy.run_path(str(ROOT / "docs/licences.py"))
AUDIT = runpy.run_path(str(ROOT / ".ci/audit.py"))


def test_the_licences_page_is_current() -> None:
    page = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    packages = LICENCES["needed"]()
    assert LICENCES["problems"](page, packages) == []
    assert packages["nex-weaver"] == {"test"}
    packages["nex-weaver"].add("remote")
    stale = page.replace("| rich | MIT |", "| rich | GPL-3.0 |")
    [proprietary, *rest] = LICENCES["problems"](stale, packages)
    assert "'Proprietary'" in proprietary
    assert [line.partition(":")[0] for line in rest] == [
        "docs/licences.md is out of date for nex-weaver",
        "docs/licences.md is out of date for rich",
    ]


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_a_licence_is_allowed_if_each_part_of_it_is(expression: str, allowed: bool) -> None:
    assert LICENCES["allowed"](expression) is allowed


def test_a_known_vulnerability_fails_the_check_and_so_does_no_answer(capsys, monkeypatch) -> None:
    good = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    unknown = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
    main = AUDIT["main"]

    def check(*reports: list[object] | None, given: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        answers = iter("" if r is None else json.dumps({"dependencies": r}) for r in reports)

        def ask(service: str, arguments: list[str]) -> str:
            assert arguments == []
            return next(answers)

        monkeypatch.setitem(main.__globals__, "ask", ask)
        return main([*given]), capsys.readouterr().out.splitlines()

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert check(None, None)[0] == check([unknown], None)[0] == 1
    assert check(None, None, given=("--offline-ok",))[0] == 0
    assert check([good]) == (0, ["pip-audit: 1 packages, 0 vulnerabilities"])
    assert check([unknown], [good, bad, unknown]) == (
        1,
        ["pip-audit: 2 packages, 1 not known, 1 vulnerabilities", "b 2: PYSEC-1, fixed in 3"],
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert check()[0] == 1, "pip-audit is not installed"
