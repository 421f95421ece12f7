"""A digest of a model's weights, to see whether they changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256, in hex, of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(values.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
