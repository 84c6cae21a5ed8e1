"""Gradients that are already there: the exchange without DDP, for pipelines and plain training loops."""

import torch
from torch import Tensor

from hooks.state import GradientBucket, HookState


def reduce_gradients(module: torch.nn.Module, state: HookState) -> None:
    """Replace `.grad` of the module's parameters by the compressed mean over the ranks; call after backward.

    A parameter without gradient on this rank counts as zero, and keeps none if no rank has one. Ranks must hold
    equal parameters at the start: unlike DDP nothing is broadcast.

    Raises:
        ValueError: a sparse gradient, or parameters other than at the first call.
        ExchangeError: the exchange failed, here or on a peer.
    """
    gradients: dict[Tensor, Tensor] = {}
    missing: dict[torch.nn.Parameter, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            gradient = missing[parameter] = torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse: make the sparse embedding dense (sparse=False)")
        gradients[parameter] = torch.view_as_real(gradient) if gradient.is_complex() else gradient.detach()
    if not gradients:
        return
    result = torch.empty(0, device=next(iter(gradients.values())).device)
    state.submit(GradientBucket(gradients, result, last=True), used=lambda each: each not in missing).wait()
    for parameter, gradient in missing.items():
        if state.used_by_any(parameter):
            parameter.grad = gradient
