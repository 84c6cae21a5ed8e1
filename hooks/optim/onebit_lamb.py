"""1-bit LAMB: LAMB's layer-wise rates, learnt in a warm-up, on compressed momentum."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from hooks.optim.base import in_cache, real, wide
from hooks.optim.onebit_adam import FrozenVariance


def trust_ratio(parameter: Tensor, update: Tensor, low: float, high: float) -> Tensor:
    """LAMB's |p| / |update|, within [low, high]; 1 where either is zero. A 0-d tensor: a device is not waited for."""
    size, length = norm(parameter), norm(update)
    return torch.where((size > 0) & (length > 0), (size / length).clamp(low, high), 1.0)


def norm(tensor: Tensor) -> Tensor:
    """The 2-norm, in float32 at least."""
    return torch.linalg.vector_norm(tensor, dtype=wide(tensor))


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
        p, g = real(parameter), real(grad).to(wide(parameter))
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
            state["coeff"], state["factor"] = (
                torch.full((), value, dtype=g.dtype, device=g.device) for value in (0, 1)
            )
        state["step"] += 1
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if group["weight_decay"]:
            update.add_(p, alpha=group["weight_decay"])
        ratio, coeff = trust_ratio(p, update, *group["coeff_bounds"]), state["coeff"]
        # The average begins with the first ratio, not with zero, or a short warm-up would leave too small a rate.
        average = torch.where(coeff == 0, ratio, coeff.lerp(ratio, 1 - group["coeff_beta"]))
        coeff.copy_(torch.where(ratio == 1, coeff, average))
        p.addcmul_(update, ratio, value=-group["lr"])

    def _bound(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
        # LAMB's variance is not corrected, so that after a short warm-up its updates are larger than Adam's.
        return super()._bound(state, group) / (1 - group["betas"][1] ** state["warm_steps"]) ** 0.5

    def _freeze(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """As Adam's, but LAMB corrects no bias."""
        state = self.state[parameter]
        variance, momentum = state.pop("exp_avg_sq"), state.pop("exp_avg")
        state["denominator"] = variance.sqrt().add_(group["eps"]).masked_fill_(variance == 0, torch.inf)
        state["fresh_variance"] = variance
        state["update"] = momentum.div_(state["denominator"])
        state["warm_steps"] = int(state["step"])
        state["last_update"] = state["update"].clone()
        state["coeff"].masked_fill_(state["coeff"] == 0, 1.0)
        self._remember_never(parameter)

    def _apply(self, parameter: Tensor, state: dict[str, Any], never: Tensor | None, group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        p, update, weight_decay = real(parameter), state["update"], group["weight_decay"]
        state["step"] += 1
        if not update.numel():
            return
        if never is not None:
            update.masked_fill_(never, 0)
        largest = []
        pieces = (update, state["last_update"], state["denominator"], state["fresh_variance"])
        for z, last, denominator, variance in in_cache(*pieces):
            # The mean gradient, from two momenta that are equal on all ranks: D (z - beta1 last) / (1 - beta1).
            grad = torch.sub(z, last, alpha=beta1).mul_(denominator)
            if never is not None:
                grad.masked_fill_(denominator.isinf(), 0)
            variance.mul_(beta2).addcmul_(grad, grad, value=(1 - beta2) / (1 - beta1) ** 2)
            moved = torch.div(denominator, torch.sqrt(variance, out=grad).add_(group["eps"]), out=grad)
            largest.append(moved.masked_fill_(denominator.isinf(), 0).max() if never is not None else moved.max())
            last.copy_(z)
        low, high, threshold = group["factor_bounds"]
        factor = torch.stack(largest).max()
        if weight_decay:
            share = (norm(update) / norm(update.add(p, alpha=weight_decay)).clamp(min=1e-30)).clamp(max=1.0)
            factor = factor * share + (1 - share)
        before = state["factor"]
        before.copy_(factor.clamp(low, high).clamp(before * (1 - threshold), before * (1 + threshold)))
        rate = state["coeff"] * before
        if weight_decay:
            p.addcmul_(p, rate, value=-group["lr"] * weight_decay)
        p.addcmul_(update, rate, value=-group["lr"])
