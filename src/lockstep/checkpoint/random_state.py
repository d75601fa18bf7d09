"""The states of this process's random numbers: torch, numpy, Python, its GPU. All Local."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return all states, as numbers, texts and tensors, so that no pickle is needed to read them.

    Returns:
        torch: uint8 tensor; numpy: name, 624 words (int64 tensor), position, and its kept normal
        number; python: its state; cuda: uint8 tensor, only where this process uses a GPU.
    """
    name, words, position, has_normal, normal = np.random.get_state(legacy=True)
    version, numbers, kept = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(words.astype(np.int64)), position, has_normal, normal],  # type: ignore[union-attr]
        "python": [version, torch.tensor(numbers, dtype=torch.int64), kept],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Set all states to what `random_state` has returned, or start them from a number.

    Args:
        state: of `random_state`; or {"seed": number}, which a rank gets that has none of its own.
    """
    if "seed" in state:
        seed = state["seed"]
        torch.manual_seed(seed)  # and the GPUs
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return
    torch.set_rng_state(state["torch"])
    name, words, position, has_normal, normal = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_normal, normal))
    version, numbers, kept = state["python"]
    random.setstate((version, tuple(numbers.tolist()), kept))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_for(rank: int, root: dict[str, Any]) -> dict[str, Any]:
    """Return a new start for a rank that has no state: the same each time, another for each rank.

    Args:
        rank: number of the rank.
        root: the state of the root, from which the number is drawn.
    """
    source = root.get("torch")
    text = source.numpy().tobytes() if source is not None else str(root["seed"]).encode()
    digest = hashlib.sha256(text + rank.to_bytes(8, "little")).digest()
    return {"seed": int.from_bytes(digest[:8], "little") >> 1}
