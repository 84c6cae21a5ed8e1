"""Checkpoints of hook states through torch.distributed.checkpoint: one folder, each rank its own part.

torch.distributed.checkpoint takes equal keys on several ranks for replicas and keeps only the first rank's value, so
every key begins with the rank. Everything is a tensor, the header too (JSON as bytes): nothing is ever unpickled.
"""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hooks.checkpoint import merge_state_dicts
from hooks.state import HookState

log = logging.getLogger("gradwire")

HEADER = "header"


def save_sharded(state: HookState, path: str | Path) -> None:
    """Write the state's part of all ranks into the folder `path`; collective on the default group.

    Raises:
        RuntimeError: before the first step.
    """
    saved = state.state_dict()
    if not saved:
        raise RuntimeError("there is nothing to save before the first step")
    dcp.save({f"rank{saved['rank']}/{key}": value for key, value in _flatten(saved).items()}, checkpoint_id=str(path))


def load_sharded(state: HookState, path: str | Path) -> None:
    """Continue from `save_sharded`, on the same or another number of ranks; each rank reads for itself.

    On another number every rank gets the mean of the memories and its slice of the server memory (see
    `merge_state_dicts`), and the log says so.

    Raises:
        ValueError: the checkpoint is not one of this state; says what differs.
    """
    metadata = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    saved_ranks = sorted({int(key.partition("/")[0].removeprefix("rank")) for key in metadata})
    same_world = len(saved_ranks) == state.peers
    wanted = {f"rank{rank}" for rank in ([state.rank] if same_world else saved_ranks)}
    flat = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if key.partition("/")[0] in wanted and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It warns that each process reads for itself, which is what is wanted.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(flat, checkpoint_id=str(path), no_dist=True)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        rank, _, name = key.partition("/")
        parts.setdefault(rank, {})[name] = value
    state_dicts = [_unflatten(part) for part in parts.values()]
    if not same_world:
        owed = len(state_dicts[0]["memory"])
        log.warning(
            "checkpoint of %d ranks resumed on %d: the mean of the error memories of %d parameters goes to every "
            "rank, server memories are cut anew",
            len(saved_ranks),
            state.peers,
            owed,
        )
    state.load_state_dict(state_dicts[0] if same_world else merge_state_dicts(state_dicts))


def _flatten(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict as flat tensors; whatever is no tensor goes into the header, with a path where a tensor was."""
    tensors: dict[str, Tensor] = {}

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, dict):
            return {"dict": {key: strip(each, f"{path}/{key}") for key, each in value.items()}}
        return {"value": value}

    text = json.dumps(strip(state_dict, "state"))
    return {**tensors, HEADER: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _unflatten(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of `_flatten`."""

    def fill(node: dict[str, Any]) -> Any:
        if "tensor" in node:
            return tensors[node["tensor"]]
        return {key: fill(each) for key, each in node["dict"].items()} if "dict" in node else node["value"]

    return fill(json.loads(bytes(tensors[HEADER].tolist())))
