"""1-bit LAMB: LAMB's layer-wise rates, learnt in a warm-up, on compressed momentum."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from hooks.optim.base import real
from hooks.optim.onebit_adam import FrozenVariance


def trust_ratio(parameter: Tensor, update: Tensor, low: float, high: float) -> float:
    """LAMB's |p| / |update|, within [low, high]; 1 where either is zero."""
    size, length = float(parameter.norm()), float(update.norm())
    return min(max(size / length, low), high) if size > 0 and length > 0 else 1.0


class OneBitLamb(FrozenVariance):
    """1-bit LAMB (Li et al., HiPC 2022, arXiv:2104.06069) on a DDP model, both halves in one call.

    Warm-up: LAMB (You et al., 2020, arXiv:1904.00962) without bias correction on exactly averaged gradients, with a
    running average c of each tensor's trust ratio. Then the variance and c are frozen, momentum is exchanged in one
    bit, and c is corrected by how a fresh variance, rebuilt from the averaged momenta, has moved against the frozen
    one: factor = max(D_frozen / D_fresh), within [factor_min, factor_max] and within factor_threshold of the last.

    The paper scales tensors to one magnitude so that one scale is fair to all; here momentum is exchanged divided
    by the frozen denominator, which does the same for every element (see FrozenVariance).

    Args:
        model: the DDP model; the optimiser registers its communication hook.
        lr, betas, eps, weight_decay: as in LAMB; weight decay is part of the update whose norm is taken.
        freeze_step: steps of warm-up; None: until the variance has settled, as in OneBitAdam.
        coeff_beta: decay of the running average of the trust ratio.
        min_coeff, max_coeff: bounds of the trust ratio.
        factor_min, factor_max, factor_threshold: bounds of the correction and of its change in one step.
        params, compressor, options: as in OneBitAdam.

    On the wire: as OneBitAdam. For `.grad` and non-finite gradients see there.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        coeff_beta: float = 0.9,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        params: Iterable[Any] | None = None,
        compressor: Compressor | str = "sign",
        **options: Any,
    ) -> None:
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"coeff_beta must be at least 0 and less than 1, got {coeff_beta!r}")
        if not 0 < min_coeff <= max_coeff:
            raise ValueError(f"need 0 < min_coeff <= max_coeff, got {min_coeff!r} and {max_coeff!r}")
        if not 0 < factor_min <= 1 <= factor_max:
            raise ValueError(f"need 0 < factor_min <= 1 <= factor_max, got {factor_min!r} and {factor_max!r}")
        if not 0 < factor_threshold < 1:
            raise ValueError(f"factor_threshold must lie between 0 and 1, got {factor_threshold!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "coeff_beta": coeff_beta,
            "coeff_bounds": (min_coeff, max_coeff),
            "factor_bounds": (factor_min, factor_max, factor_threshold),
        }
        super().__init__(model, params, defaults, freeze_step, compressor, options)

    def _decouples(self, group: Mapping[str, Any]) -> bool:
        return True

    def _warm_update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        p, grad = real(parameter), real(grad)
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["coeff"], state["factor"] = torch.tensor(0.0), torch.tensor(1.0)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if group["weight_decay"]:
            update.add_(p, alpha=group["weight_decay"])
        ratio = trust_ratio(p, update, *group["coeff_bounds"])
        if ratio != 1.0:
            state["coeff"].lerp_(torch.tensor(ratio), 1 - group["coeff_beta"])
        p.add_(update, alpha=-group["lr"] * ratio)

    def _freeze(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        state["fresh_variance"] = state["exp_avg_sq"].float().clone()
        # LAMB as implemented by its users corrects no bias; keep the units of the trust ratio.
        variance, momentum = state.pop("exp_avg_sq").float(), state.pop("exp_avg").float()
        state["denominator"] = variance.sqrt().add_(group["eps"]).masked_fill_(variance == 0, torch.inf)
        state["update"] = momentum.div_(state["denominator"])
        if state["coeff"] == 0:
            state["coeff"].fill_(1.0)
        state["last_update"] = state["update"].clone()
        self._remember_never(parameter)

    def _apply(self, parameter: Tensor, update: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        p, denominator = real(parameter), state["denominator"]
        state["step"] += 1
        # The mean gradient, from two momenta that are equal on all ranks.
        grad = (update - beta1 * state["last_update"]).div_(1 - beta1).mul_(denominator)
        never = self._never[parameter]
        if never is not None:
            grad.masked_fill_(never, 0)
        state["fresh_variance"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        moved = denominator / state["fresh_variance"].sqrt().add_(group["eps"])
        if never is not None:
            moved.masked_fill_(never, 0)
        state["last_update"].copy_(update)
        step = update.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else update
        share = min(1.0, float(update.norm()) / max(float(step.norm()), 1e-30))
        low, high, threshold = group["factor_bounds"]
        last = float(state["factor"])
        factor = float(moved.max()) * share + (1 - share)
        factor = min(max(factor, low), high)
        factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
        state["factor"].fill_(factor)
        p.add_(step, alpha=-group["lr"] * float(state["coeff"]) * factor)
