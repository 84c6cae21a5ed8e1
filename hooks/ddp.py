"""DDP: buckets as a source of gradients, the hook functions, and `register`."""

# No postponed annotations here: DDP looks at the hooks' annotations and refuses strings.
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from compress.options import own_options
from hooks.state import GradientBucket, HookState

Hook = Callable[[Any, dist.GradBucket], "Future[Tensor]"]


def gradient_views(bucket: dist.GradBucket) -> dict[Tensor, Tensor]:
    """Each parameter's gradient as a real view into the bucket, in the parameter's shape (complex: x 2).

    Offsets come from the parameters: `bucket.gradients()` ignores the strides of transposed ones and miscounts
    complex ones, of which the bucket holds two real numbers an element.

    Raises:
        ValueError: a sparse gradient.
    """
    flat = bucket.buffer()
    if flat.layout != torch.strided:
        raise ValueError(
            "a sparse gradient cannot be compressed: make the sparse embedding dense (sparse=False), or keep its "
            "parameters out of DDP with DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    views, offset = {}, 0
    for parameter in bucket.parameters():
        real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        strides = real.stride() if _fills_its_storage(real) else torch.empty(real.shape, device="meta").stride()
        views[parameter] = flat.as_strided(real.shape, strides, flat.storage_offset() + offset)
        offset += real.numel()
    return views


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether the elements cover one stretch of memory without gaps, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def compress_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook for any compressor: `ddp_model.register_comm_hook(HookState("sign"), compress_hook)`.

    Raises:
        TypeError: `state` is not a HookState.
    """
    return _exchange(state, bucket, "compress_hook", "HookState('powersgd:rank=4')")


def _exchange(state: Any, bucket: dist.GradBucket, hook: str, example: str) -> "Future[Tensor]":
    if not isinstance(state, HookState):
        raise TypeError(f"{hook} expects a state: register_comm_hook({example}, {hook}), got {state!r}")
    return state.submit(GradientBucket(gradient_views(bucket), bucket.buffer(), bucket.is_last()))


def named_pair(compressor_type: type[Compressor]) -> tuple[type[HookState], Hook]:
    """The state class and the hook function of one compressor: `PowerSGDState`, `powersgd_hook`.

    The state takes the compressor's options beside those of HookState.
    """
    state_name, hook_name = f"{compressor_type.__name__}State", f"{compressor_type.name}_hook"

    own = [field.name for field in own_options(compressor_type)]
    shared = [name for name in signature(HookState).parameters if name != "compressor"]

    def __init__(self: HookState, **options: Any) -> None:
        unknown = [name for name in options if name not in own and name not in shared]
        if unknown:
            raise TypeError(f"{state_name} has no option {unknown[0]!r}; its options are {', '.join([*own, *shared])}")
        chosen = {name: options.pop(name) for name in own if name in options}
        HookState.__init__(self, compressor_type(**chosen), **options)

    doc = f"HookState of a {compressor_type.__name__}; takes its options ({', '.join(own)}) and those of HookState."
    state_type = type(state_name, (HookState,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})

    def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _exchange(state, bucket, hook_name, f"{state_name}(…)")

    hook.__name__ = hook.__qualname__ = hook_name
    hook.__doc__ = f"DDP communication hook for a {state_name}."
    return state_type, hook


def register(model: DistributedDataParallel, compressor: Compressor | str, **options: Any) -> HookState:
    """Compress a DDP model's gradients from its next step on: `hooks.register(ddp, "powersgd:rank=4")`.

    Args:
        compressor: a compressor or its spec.
        options: those of HookState (seed, error_feedback, unit_cap_mb, timeout …).

    Returns:
        The state, for statistics and checkpoints.

    Raises:
        TypeError: `model` is not a DistributedDataParallel.
        RuntimeError: the model has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"register() needs a DistributedDataParallel model, got {type(model).__name__}")
    if getattr(model, "_comm_hooks", None):
        raise RuntimeError("this model has a communication hook already; DDP takes one only once")
    state = HookState(compressor, model=model, **options)
    model.register_comm_hook(state, compress_hook)
    return state


def ddp_hook(function: Callable[[Any, Any], "Future[Tensor]"]) -> Hook:
    """Make any callable of (state, bucket) a hook that DDP accepts.

    DDP refuses callables that are not plain functions, whose second argument has another name, or whose
    annotations are strings (from `from __future__ import annotations`).
    """

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return function(state, bucket)

    hook.__name__ = hook.__qualname__ = f"{getattr(function, '__name__', type(function).__name__)}_for_ddp"
    hook.__doc__ = function.__doc__
    return hook
