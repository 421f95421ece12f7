"""A process that calls one agent function: `environment: {type: agent, process: true}`.

The argument is the working folder. The job is JSON on stdin, and the result is written to
result.json in the folder, so that the function may print. What it raises goes to stderr, with one
line at the end that names the function's line, and with exit code 1.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from pathlib import Path

from retrain.config.plugins import find_function
from retrain.errors import blame
from retrain.supervision.jsonable import plain


def main() -> None:
    job, result = json.load(sys.stdin), Path(sys.argv[1], "result.json")
    function = find_function(job["function"], Path(job["base_dir"]), "environment.run")
    os.chdir(result.parent)
    try:
        answer = function(**job["arguments"])
        if inspect.isawaitable(answer):
            answer = asyncio.run(asyncio.wait_for(answer, None))
    except Exception as error:  # noqa: BLE001 - the agent's
        traceback.print_exc()
        raise SystemExit(" ".join(str(blame(job["function"], error)).split())) from None
    if isinstance(answer, tuple) and hasattr(answer, "_asdict"):  # a StepResult
        fields = answer._asdict()
        answer = {**fields["info"], "reward": fields["reward"]}
    result.write_text(json.dumps(plain(answer)), encoding="utf-8")


if __name__ == "__main__":
    main()
