"""1-bit Adam: Adam on exact gradients until the variance settles, then compressed momentum with frozen variance."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from hooks.optim.base import CompressedOptimizer, adams_bound, check_count, in_cache, real, stays_put, wide


def adam_update(parameter: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """One step of Adam or AdamW, in the order of operations of torch.optim's, hence with its bits."""
    beta1, beta2 = group["betas"]
    lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(real(parameter)), torch.zeros_like(real(parameter))
    state["step"] += 1
    if weight_decay and group["decoupled_weight_decay"]:
        parameter.mul_(1 - lr * weight_decay)
    elif weight_decay:
        grad = grad.add(parameter, alpha=weight_decay)
    grad, step = real(grad), state["step"].item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    real(parameter).addcdiv_(state["exp_avg"], denominator, value=-(lr / (1 - beta1**step)))


def freeze(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Turn Adam's moments into a fixed denominator and the momentum divided by it, both at least float32.

    Both moments are corrected for their bias once, here. Where the variance is exactly zero the element has never
    had a gradient: its denominator is infinite, so that it stays where it is.
    """
    beta1, beta2 = group["betas"]
    step, dtype = state["step"].item(), wide(state["exp_avg"])
    variance, momentum = state.pop("exp_avg_sq").to(dtype), state.pop("exp_avg").to(dtype)
    denominator = (variance / (1 - beta2**step)).sqrt_().add_(group["eps"])
    state["denominator"] = denominator.masked_fill_(variance == 0, torch.inf)
    state["update"] = momentum.div_(1 - beta1**step).div_(denominator)


class FrozenVariance(CompressedOptimizer):
    """What 1-bit Adam and 1-bit LAMB share: a warm-up, a freeze, and compressed momentum after it.

    Momentum is compressed *divided by the frozen denominator*: z <- mean of (beta1 z + (1 - beta1) g / D). With an
    exact mean this is the paper's recursion, m = D z. But all elements of z are of one size, about that of an
    update in units of lr, so that one scale per block is fair to all, and the sign noise of an element whose
    variance is tiny moves it by the noise of z, not by that over a tiny number, which broke other
    implementations. Before it is sent z is clamped to the most that Adam itself could move (`adams_bound`).

    A parameter that has had no gradient when the others freeze stays in its own warm-up until it has had as many
    steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        freeze_step: int | None,
        compressor: Compressor | str,
        options: Mapping[str, Any],
    ) -> None:
        if freeze_step is not None:
            check_count("freeze_step", freeze_step, 1)
        super().__init__(model, params, defaults, compressor, options)
        self.freeze_step = freeze_step
        self.frozen_at: int | None = None
        self._steps = 0
        self._variance_norm: float | None = None
        self._never: dict[Tensor, Tensor | None] = {}

    @property
    def frozen(self) -> bool:
        """Whether the compressed stage has begun."""
        return self.frozen_at is not None

    def _averages_gradients(self) -> bool:
        return not self.frozen

    def _update(self) -> None:
        self._steps += 1
        if self.frozen:
            self._compressed_update()
            return
        for group, parameter in self._grouped():
            if parameter.grad is not None:
                self._warm_update(parameter, parameter.grad, self.state[parameter], group)
        if self._steps == self.freeze_step or (self.freeze_step is None and self._variance_has_settled()):
            self.frozen_at = self._steps
            for group, parameter in self._grouped():
                if self.state[parameter]:
                    self._freeze(parameter, group)

    def _variance_has_settled(self) -> bool:
        """The paper's criterion: the 1-norm of the variance changes by less than 4 % over 1/(1 - beta2) steps."""
        period = max(round(1 / (1 - group["betas"][1])) for group in self.param_groups)
        if self._steps % period:
            return False
        norms = [
            self.state[p]["exp_avg_sq"].sum(dtype=torch.float32)
            / (1 - group["betas"][1] ** float(self.state[p]["step"]))
            for group, p in self._grouped()
            if self.state[p]
        ]
        before, now = self._variance_norm, float(sum(norm.cpu() for norm in norms))
        self._variance_norm = now
        return before is not None and min(before, now) >= 0.96 * max(before, now)

    def _freeze(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        freeze(self.state[parameter], group)
        self._remember_never(parameter)

    def _remember_never(self, parameter: Tensor) -> None:
        self._never[parameter] = stays_put(self.state[parameter]["denominator"])

    def _compressed_update(self) -> None:
        assert self.frozen_at is not None
        grouped = self._grouped()
        young = [p for _, p in grouped if "denominator" not in self.state[p]]
        late = [p for p in young if p.grad is not None]
        self._average_now(late)
        in_warm_up = set(late)
        momenta: dict[Tensor, Tensor] = {}
        idle: set[Tensor] = set()
        for group, parameter in grouped:
            state = self.state[parameter]
            if parameter.grad is None or "denominator" not in state:
                idle.add(parameter)
                momenta[parameter] = torch.zeros_like(real(parameter), dtype=wide(parameter))
            else:
                self._take_gradient_in(parameter, state, group)
                momenta[parameter] = state["update"]
        self._exchange(momenta, idle)
        for group, parameter in grouped:
            if parameter not in idle:
                self._apply(parameter, self.state[parameter], self._never[parameter], group)
        for group, parameter in grouped:
            if parameter in in_warm_up:
                self._warm_update(parameter, parameter.grad, self.state[parameter], group)  # type: ignore[arg-type]
                if self.state[parameter]["step"] >= self.frozen_at:
                    self._freeze(parameter, group)

    def _take_gradient_in(self, parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """z <- beta1 z + (1 - beta1) g / D with this rank's gradient, within what Adam itself could reach."""
        beta1 = group["betas"][0]
        bound, decay = self._bound(state, group), 0.0 if self._decouples(group) else group["weight_decay"]
        grad = real(parameter.grad)  # type: ignore[arg-type]
        for update, g, p, denominator in in_cache(state["update"], grad, real(parameter), state["denominator"]):
            update.mul_(beta1).addcdiv_(g, denominator, value=1 - beta1)
            if decay:
                update.addcdiv_(p, denominator, value=(1 - beta1) * decay)
            update.clamp_(-bound, bound)

    def _bound(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
        """The largest magnitude of momentum over denominator that warm-up itself could have brought."""
        return adams_bound(*group["betas"])

    def _decouples(self, group: Mapping[str, Any]) -> bool:
        raise NotImplementedError

    def _warm_update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _apply(self, parameter: Tensor, state: dict[str, Any], never: Tensor | None, group: Mapping[str, Any]) -> None:
        """Move the parameter by the averaged momentum, which is `state["update"]` already; not where `never`."""
        raise NotImplementedError

    def _extra_state(self) -> dict[str, Any]:
        return {"steps": self._steps, "frozen_at": self.frozen_at, "variance_norm": self._variance_norm}

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self._steps, self.frozen_at = extra["steps"], extra["frozen_at"]
        self._variance_norm = extra["variance_norm"]
        self._never.clear()
        for _, parameter in self._grouped():
            if "denominator" in self.state[parameter]:
                self._remember_never(parameter)


class OneBitAdam(FrozenVariance):
    """1-bit Adam (Tang et al., ICML 2021, arXiv:2102.02888) on a DDP model, both halves in one call.

    Until `freeze_step` exactly torch's Adam (or AdamW) on exactly averaged gradients; then
    z <- mean(beta1 z + (1 - beta1) g / D) by a one-bit exchange with error feedback, p <- p - lr z.

    Args:
        model: the DDP model; the optimiser registers its communication hook.
        lr, betas, eps, weight_decay: as in torch.optim.Adam.
        decoupled_weight_decay: as in AdamW.
        freeze_step: steps of warm-up, 15 to 25 % of all; None: until the variance has settled (the 1-norm changes
            by less than 4 % over 1/(1 - beta2) steps).
        params: parameters or groups, as in torch; together all trainable ones of the model.
        compressor: of the momentum.
        options: of HookState: seed, timeout, unit_cap_mb …

    On the wire: dense during the warm-up, then that of the compressor: 1/32 of float32 with sign; and one number
    a step by which all ranks agree whether gradients are finite.

    In the compressed stage `.grad` is this rank's own gradient: clipping acts on it locally. A non-finite
    gradient on any rank makes those of all ranks NaN, so that GradScaler skips everywhere; without one, `step()`
    leaves the step out and counts it in `skipped`.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is unusable, or the model has a hook already.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        freeze_step: int | None = None,
        params: Iterable[Any] | None = None,
        compressor: Compressor | str = "sign",
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(model, params, defaults, freeze_step, compressor, options)

    def _decouples(self, group: Mapping[str, Any]) -> bool:
        return group["decoupled_weight_decay"]

    def _warm_update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        adam_update(parameter, grad, state, group)

    def _apply(self, parameter: Tensor, state: dict[str, Any], never: Tensor | None, group: Mapping[str, Any]) -> None:
        state["step"] += 1
        if never is not None:
            state["update"].masked_fill_(never, 0)
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        real(parameter).add_(state["update"], alpha=-group["lr"])
