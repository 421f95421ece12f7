"""The `sampler:` keys: this process, or vLLM servers. Imports no torch."""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from retrain.config.paths import places
from retrain.engine.available import present_devices
from retrain.errors import ConfigError, shown
from retrain.vllm.environment import devices_problem, environment_problem
from retrain.wire.vendors import checked_url

OURS = {
    "model": "`model`",
    "served_model_name": "",
    "host": "",
    "port": "",
    "api_key": "the environment variable VLLM_API_KEY",
    "tensor_parallel_size": "`tensor_parallel`",
    "gpu_memory_utilization": "`gpu_memory`",
    "device": "`devices`",
    "logprobs_mode": "",
    "max_logprobs": "",
    "enable_scale_out": "",
    "enable_lora": "`lora` of the backend",
    "max_loras": "`staleness.max`",
    "max_cpu_loras": "`staleness.max`",
    "max_lora_rank": "`lora.r` of the backend",
    "worker_extension_cls": "`publish: group`",
}
"""vLLM's flags that a run sets itself, and the key that sets them."""
SHORT_FORMS = {"tp": "tensor_parallel_size", "o": "optimization_level"}

HEATS = (0.01, 2.0)
"""Temperatures of vLLM beside 0: it rejects higher ones, and samples lower ones at 0.01."""

Publish = Literal["auto", "adapter", "folder", "group"]
InFlight = Literal["recompute", "keep_cache", "drain"]


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class LocalSamplerOptions(_Options):
    """The trained model is sampled in the same process, by retrain's local sampler."""

    type: Literal["local"] = "local"


class VllmOptions(_Options):
    """Sampling with vLLM servers (0.32 or later): servers that are already running (`url`), or
    servers that the run starts (`python`). See docs/vllm.md."""

    type: Literal["vllm"] = "vllm"
    url: str | list[str] | None = None
    """The URL of a running server, or a list of URLs of servers with the same model."""
    python: Path | None = None
    """The Python of the environment in which vLLM is installed. The run starts the server, restarts
    it if it dies, and stops it at the end."""
    devices: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """The GPUs of the servers that the run starts, `tensor_parallel` per server, as CUDA device
    numbers; by default one server that sees every GPU."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """The number of GPUs that share one copy of the model."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The fraction of a GPU's memory that a server may use."""
    args: dict[str, Any] = Field(default_factory=dict)  # values of whatever type vLLM gives a flag
    """Further flags of vLLM for a server that the run starts: `{max_num_seqs: 512}` is
    `--max-num-seqs 512`."""
    publish: Publish = "auto"
    """How weights reach the servers. `adapter`: LoRA adapters; `folder`: files that the servers
    read; `group`: a torch process group. `auto`: `adapter` with `lora`, else `group` if the run
    starts the server, else `folder`."""
    folder: Path | None = None
    """The folder where weights are written for the servers, which must read it under the same path;
    by default in memory (/dev/shm) if three copies fit there, otherwise the run's scratch
    folder."""
    in_flight: InFlight = "recompute"
    """What happens to running requests while weights change. `recompute`: they continue with a
    recomputed cache, which is exact; `keep_cache`: they continue with the old cache, which is
    faster but inexact; `drain`: the publish waits for them."""
    check: Annotated[float, Field(gt=0)] = 0.05
    """The largest mean difference, in nats, between the log-probabilities of server and trainer at
    the start."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How many times the run may restart a server that died."""
    start_seconds: Annotated[float, Field(gt=0)] | None = None
    """The time limit, in seconds, for the start of a server; by default 600, or 60 for a server at
    `url` that refuses every connection."""

    @field_validator("url")
    @classmethod
    def _urls(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == []:
            raise ValueError("the list is empty; expected at least one URL")
        urls = [value] if isinstance(value, str) else value or []
        try:
            checked = [checked_url(url) for url in urls]
        except ConfigError as error:
            raise ValueError(re.sub("^url: (got '.*?', )?", "", str(error))) from None
        if len(set(checked)) < len(checked):
            raise ValueError("a URL appears twice; expected each server once")
        return checked[0] if isinstance(value, str) else value and checked

    @field_validator("args")
    @classmethod
    def _further(cls, value: dict[str, Any]) -> dict[str, Any]:
        wrong = [why for name, given in value.items() for why in _refusals(name, given)]
        if wrong:
            raise ValueError("; ".join(wrong))
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.python is None):
            got = "neither" if self.url is None else "both"
            raise ValueError(
                f"got {got} of url and python, expected one: the URL of a running server, or the "
                "Python of the environment with vLLM, for a server that the run starts"
            )
        own = ("devices", "tensor_parallel", "gpu_memory", "args", "restarts")
        changed = [name for name in own if getattr(self, name) != self._default(name)]
        if self.url is not None and changed:
            raise ValueError(
                f"got url and {', '.join(changed)}, which only apply to a server that the run "
                "starts (python): remove them, and start the server with vLLM's own flags"
            )
        if len(set(self.devices)) < len(self.devices) or len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"devices: got {self.devices}, expected different devices, a multiple of "
                f"tensor_parallel ({self.tensor_parallel})"
            )
        return self

    @classmethod
    def _default(cls, name: str) -> Any:  # of whatever type the field has
        return cls.model_fields[name].get_default(call_default_factory=True)

    @property
    def urls(self) -> list[str]:
        """The servers that the run does not start."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    def layout(self, *, lora: bool) -> str:
        """The number of servers, and how weights reach them."""
        number = len(self.urls) or max(len(self.devices) // self.tensor_parallel, 1)
        servers = "1 server" if number == 1 else f"{number} servers"
        return f"{servers}, publish {self.way(lora=lora)}"

    def way(self, *, lora: bool) -> Literal["adapter", "folder", "group"]:
        """`publish` with `auto` decided."""
        if self.publish != "auto":
            return self.publish
        return "adapter" if lora else "group" if self.python else "folder"

    def problems(self, base_dir: Path, *, lora: bool) -> Iterator[str]:
        """What else is wrong, for a config in `base_dir` that trains all weights or a LoRA."""
        if self.python is not None and not _is_program(located(self.python, base_dir)):
            tried = " or ".join(map(str, places(str(self.python), base_dir)))
            yield (
                f"python: {tried} is not a program; expected the Python of the environment with "
                "vLLM, such as /path/to/env/bin/python"
            )
        if self.publish == "adapter" and not lora:
            yield (
                "publish: got 'adapter', but the full weights are trained; set backend.lora, or "
                "publish to folder or group"
            )
        if self.folder is not None:
            if not located(self.folder, base_dir).is_dir():
                tried = " or ".join(map(str, places(str(self.folder), base_dir)))
                yield f"folder: {tried} is not a folder; create it where every server can read it"
            if self.way(lora=lora) == "group":
                yield "folder: has no effect because `publish` is group; remove it"
        elif self.way(lora=lora) != "group":
            for url in filterfalse(is_here, self.urls):
                yield (
                    f"folder: {url} is on another machine, which can't read this one's files; set "
                    "it to a folder that both can read under the same path"
                )

    def missing(self, base_dir: Path) -> Iterator[str]:
        """What a server that the run starts would not find on this machine."""
        programs = () if self.python is None else (located(self.python, base_dir),)
        for program in filter(_is_program, programs):  # if it is none, `problems` says so
            if problem := environment_problem(program):
                yield f"python: {problem}"
        if problem := devices_problem(self.devices):
            yield f"devices: {problem}"

    def warnings(self) -> Iterator[str]:
        """What could not be checked."""
        if self.devices and present_devices() is None:
            yield (
                f"devices: got {self.devices}, but nvidia-smi is missing or fails on this "
                "machine: without GPUs, the servers will run on the CPU or not start"
            )


def located(path: Path, base_dir: Path) -> Path:
    """An absolute path: in the config's folder, or in the working folder if only that has it."""
    tried = places(str(path), base_dir)
    return next((found for found in tried if found.exists()), tried[0]).absolute()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def is_here(url: str) -> bool:
    """Whether the host of a URL is this machine's loopback."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refusals(name: str, value: object) -> Iterator[str]:
    """Why a flag can't be passed on."""
    flag = re.sub("-", "_", name.removeprefix("--"))
    flag = SHORT_FORMS.get(flag, flag.removeprefix("no_"))
    if flag in OURS:
        key = f"set {OURS[flag]} instead" if OURS[flag] else "remove it"
        yield f"{name}: the run sets this flag of vLLM itself; {key}"
    elif not re.fullmatch(r"[a-z][a-z0-9_]*", flag):
        yield f"{name}: expected a flag of vLLM such as max_num_seqs"
    elif value is None:
        yield f"{name}: got {shown(value)}, expected the flag's value (true for a switch)"
