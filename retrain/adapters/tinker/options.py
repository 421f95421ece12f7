"""The `backend:` keys of `type: tinker`, and its capabilities. Imports no httpx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retrain.adapters.remote.options import RemoteOptions
from retrain.losses import native_to
from retrain.wire.vendors import TINKER


class TinkerOptions(RemoteOptions):
    """`backend: {type: tinker, ...}`: a service that speaks Tinker's protocol trains and samples.

    The key comes from TINKER_API_KEY.
    """

    adapter: ClassVar[str] = "retrain.adapters.tinker.adapter:TinkerAdapter"
    vendor = TINKER

    native_losses: frozenset[str] = native_to("tinker")
    """Losses that the service computes. The others are computed on this machine and cost another
    forward pass. Remove the losses that your server lacks."""
    wire: Literal["proto", "json"] = "proto"
    """The wire format. `json` is for servers that don't support protobuf."""
    checkpoint_ttl: Annotated[int, Field(ge=3600)] | None = None
    """How many seconds the service keeps a checkpoint; null: until `checkpoint.keep` deletes it."""
    project: str | None = None
    """The id of the project that the session is billed to."""
    tags: tuple[str, ...] = ()
    """Tags of the session, to find it by."""

    def needs(self) -> Mapping[str, Sequence[str]]:
        """Those of every remote backend, and the wire format's."""
        [(extra, modules)] = super().needs().items()
        return {extra: (*modules, "google.protobuf") if self.wire == "proto" else modules}
