"""Looks for known vulnerabilities of the pinned packages: fails if there is one.

pip-audit asks a vulnerability service on the network. If none answers, nothing is known and the
check fails, unless `--offline-ok` accepts that.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
SERVICES = "pypi", "osv"
TIMEOUT = 3
"""Seconds that one request may take."""
OFFLINE_OK = "--offline-ok"
TOTAL = 60
"""Seconds that all requests to one service may take."""


def main(arguments: list[str]) -> int:
    """The exit code. `arguments` other than OFFLINE_OK go to pip-audit."""
    offline_ok = OFFLINE_OK in arguments
    arguments = [argument for argument in arguments if argument != OFFLINE_OK]
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit: not installed, so vulnerabilities are unknown; run `make test` first")
        return 1
    for service in SERVICES:
        found = verdict(ask(service, arguments))
        if found is not None:
            print(*found, sep="\n")
            return int(len(found) > 1)
    print(
        "pip-audit: no vulnerability service can be reached, so vulnerabilities are unknown"
        + ("" if offline_ok else f'; to accept that: make check AUDIT="{OFFLINE_OK}"')
    )
    return int(not offline_ok)


def ask(service: str, arguments: list[str]) -> str:
    """pip-audit's report as JSON; empty if it failed."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINS), "--no-deps"]
    command += ["--disable-pip", "--progress-spinner=off", "--format=json", f"--timeout={TIMEOUT}"]
    command += [f"--vulnerability-service={service}", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOTAL).stdout
    except subprocess.TimeoutExpired:
        return ""


def verdict(report: str) -> list[str] | None:
    """A summary and one line per vulnerable package; None if the service knew no package."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError):
        return None
    known = [one for one in packages if "skip_reason" not in one]
    if not known:
        return None
    unknown = f", {len(packages) - len(known)} not known" if len(known) < len(packages) else ""
    found = [
        f"{one['name']} {one['version']}: {vulnerability['id']}, "
        f"fixed in {', '.join(vulnerability['fix_versions']) or 'no version'}"
        for one in known
        for vulnerability in one["vulns"]
    ]
    return [f"pip-audit: {len(known)} packages{unknown}, {len(found)} vulnerabilities", *found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
