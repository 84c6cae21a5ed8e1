"""The shared acceptance cases on this library: names and options of the cases in terms of ours."""

import inspect
import io
from typing import Any

import torch
import torch.distributed as dist
from harness import Skip

import hooks
from compress import Compressor, Warmup, registry

RENAMED = {"min_rate": "min_compression_rate"}
STATE_OPTIONS = set(inspect.signature(hooks.HookState).parameters)


_met = False


def meet() -> None:
    """Wait once for all ranks: one that is done and leaves before the others have connected would break their start."""
    global _met
    if not _met:
        dist.barrier()
        _met = True


def compressor_of(name: str, options: dict[str, Any]) -> Compressor:
    """Takes the compressor's options out of `options`."""
    meet()
    if name == "batched_powersgd":
        name = "powersgd"  # matrices of one shape are always handled together
    if name not in registry:
        raise Skip(f"there is no compressor {name!r}")
    if options.pop("batched", None) is not None and name != "powersgd":
        raise Skip("only PowerSGD batches")
    if "epsilon" in options or "wire" in options:
        raise Skip("no epsilon (QR needs none) and no half-width factors")
    start = options.pop("start", 0)
    chosen = {RENAMED.get(key, key): options.pop(key) for key in list(options) if key not in STATE_OPTIONS}
    compressor = registry[name](**chosen)
    return Warmup(compressor, steps=start) if start else compressor


def make(name: str, **options: Any) -> tuple[hooks.HookState, Any]:
    compressor = compressor_of(name, options)
    return hooks.HookState(compressor, **options), hooks.compress_hook


def register(ddp: torch.nn.parallel.DistributedDataParallel, name: str, **options: Any) -> hooks.HookState:
    compressor = compressor_of(name, options)
    return hooks.register(ddp, compressor, **options)


def save(state: hooks.HookState) -> bytes:
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    return file.getvalue()


def load(blobs: list[bytes], rank: int, world: int, state: hooks.HookState) -> hooks.HookState:
    saved = [torch.load(io.BytesIO(blob), weights_only=True) for blob in blobs]
    state.load_state_dict(saved[rank] if len(saved) == world else hooks.merge_state_dicts(saved))
    return state


wrap = hooks.ddp_hook
