"""Writes licences.md: `python docs/licences.py`. `--check` fails if the page is out of date.

The packages are those that constraints.txt pins and pyproject.toml needs. A licence is read from
the metadata of the installed package; a package that is not installed is not checked.
"""

import re
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

PAGE = Path(__file__).with_suffix(".md")
PROJECT = tomllib.loads((PAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
PINS = (PAGE.parent.parent / "constraints.txt").read_text(encoding="utf-8")
MARK = "<!-- Everything below is written by docs/licences.py. -->\n"
ALLOWED = (
    "0BSD Apache-2.0 BSD BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MPL-2.0"
)
ALLOWED += " PSF-2.0 Zlib"
FOR_TESTS = {"nex-weaver"}  # other licences: no user installs these packages
CUDA = ("nvidia-", "cuda-")  # packages of a CUDA build of torch, with NVIDIA's licence
OLD = {  # names of licences in metadata without a License-Expression, as patterns
    **{r"apache\b.*": "Apache-2.0", r"(the )?mit\b.*": "MIT", r"3-clause bsd.*": "BSD-3-Clause"},
    **{r"bsd( license)?": "BSD", r"isc\b.*": "ISC", r"psfl|python soft.*": "PSF-2.0"},
    r"mozilla public license 2.*": "MPL-2.0",
}
FROM_FILE = {"zss": "BSD-3-Clause"}  # packages whose metadata names no licence


def needed() -> dict[str, set[str]]:
    """The extras (or `core`) that need each installed package, by its canonical name."""
    found, sets = defaultdict(set), PROJECT["project"]["optional-dependencies"]
    for extra, roots in {"core": PROJECT["project"]["dependencies"], **sets}.items():
        todo, seen = [Requirement(root) for root in roots], set()
        while todo:
            one = todo.pop()
            name, inner = canonical(one.name), ("", *one.extras)
            try:
                lines = [] if name.startswith(CUDA) else metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            if (name, inner) not in seen and not name.startswith(CUDA):
                seen.add((name, inner))
                found[name].add(extra)
                needs = [(need, need.marker) for need in map(Requirement, lines)]
                todo += [
                    n for n, m in needs if not m or any(m.evaluate({"extra": e}) for e in inner)
                ]
    return found


def licence(name: str) -> str:
    """An SPDX expression, or else the name that the package gives."""
    package = metadata.metadata(name)
    own = package.get("License-Expression") or (package.get("License") or "").strip()
    lines = [line for line in package.get_all("Classifier") or [] if "License :: OSI" in line]
    names = [own, *(line.rpartition(" :: ")[2] for line in lines)]
    spdx = [
        s for n in names for p, s in ((re.escape(n), n), *OLD.items()) if re.fullmatch(p, n, re.I)
    ]
    named = FROM_FILE.get(name) or own.partition("\n")[0] or "unknown"
    return next(filter(allowed, spdx), named)


def allowed(expression: str) -> bool:
    """Whether each part of the expression offers an allowed licence."""
    parts = re.sub(r"[()]| WITH [\w.-]+", "", expression).split(" AND ")
    return all({*ALLOWED.split()} & {*part.split(" OR ")} for part in parts)


def rows(packages: dict[str, set[str]]) -> dict[str, str]:
    """The line of each pinned package."""
    pinned, lines = map(canonical, re.findall(r"(?m)^([\w.-]+)==", PINS)), {}
    for name in sorted(packages.keys() & {*pinned}):
        users = sorted(packages[name] - {"test", "dev"}) or ["tests and development"]
        shown = "core" if "core" in users else ", ".join(users)
        lines[name] = f"| {name} | {licence(name)} | {shown} |"
    return lines


def problems(page: str, packages: dict[str, set[str]]) -> list[str]:
    """Licences that are not allowed, and lines that are missing on the page."""
    bad = {name: licence(name) for name in packages if not allowed(licence(name))}
    bad = {
        n: text for n, text in bad.items() if n not in FOR_TESTS or packages[n] - {"test", "dev"}
    }
    stale = [n for n, line in rows(packages).items() if line not in page.splitlines()]
    return [
        f"{n}: its licence {text!r} is not allowed by docs/licences.py" for n, text in bad.items()
    ] + [f"docs/licences.md is out of date for {name}: run `make docs`" for name in stale]


if __name__ == "__main__":
    present = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit("\n".join(problems(present, needed())) or None)
    table = ["| package | licence | needed by |", "|---|---|---|", *rows(needed()).values()]
    PAGE.write_text("\n".join([present.partition(MARK)[0] + MARK, *table, ""]), encoding="utf-8")
