"""0/1 Adam: one bit when it communicates, and ever more steps in which it does not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from hooks.optim.base import CompressedOptimizer, adams_bound, check_count, check_hyperparameters, real


def variance_steps(scaler: int, last: int) -> frozenset[int]:
    """The steps, from 1 to `last`, at which the variance is updated: the gaps are 2^floor(j / scaler)."""
    steps, step, number = [], 1, 0
    while step <= last:
        steps.append(step)
        step += 2 ** (number // scaler)
        number += 1
    return frozenset(steps)


def sync_interval(step: int, scaler: int, longest: int) -> int:
    """Steps between synchronisations, `step` steps after the freeze: doubles every `scaler` steps up to `longest`."""
    return min(2 ** min(step // scaler, 62), longest)


class ZeroOneAdam(CompressedOptimizer):
    """0/1 Adam (Lu, Li, Zhang, De Sa, He, ICLR 2023, arXiv:2202.06009) on a DDP model, both halves in one call.

    Until `freeze_step`: at the steps of the variance policy gradients are averaged exactly and update both
    moments; at the others g / D is exchanged in one bit and updates the momentum only, D being the current
    denominator. After it the variance is frozen and the ranks take local steps; every so many steps
    (local-step policy) they exchange how far they have come, in one bit, and take the mean of it:
    p <- anchor + mean(p - anchor), z <- -mean(p - anchor) / (sum of lr).

    What is exchanged is always in units of updates, not of gradients, so that one scale per block is fair to
    all elements. Parameters are set from the anchor, which is equal on all ranks, so replicas are bitwise equal
    after every synchronisation; **between synchronisations they differ**: evaluate and save only when
    `synchronised`.

    Args:
        model: the DDP model; the optimiser registers its communication hook.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW (weight decay is decoupled).
        freeze_step: step after which the variance is frozen and local steps begin.
        variance_scaler: updates of the variance after which the gap between them doubles.
        local_step_scaler: steps after which the interval between synchronisations doubles.
        local_step_clipper: longest interval between synchronisations, in steps.
        params, compressor, options: as in OneBitAdam.

    On the wire: dense at the steps of the variance policy, the compressor's at the others before the freeze and at
    synchronisations after it, nothing in between.

    For `.grad` and non-finite gradients see OneBitAdam; a rank may skip a local step by itself.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 1000,
        variance_scaler: int = 16,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        params: Iterable[Any] | None = None,
        compressor: Compressor | str = "sign",
        **options: Any,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        for name, value in (
            ("freeze_step", freeze_step),
            ("variance_scaler", variance_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            check_count(name, value, 1)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, params, defaults, compressor, options)
        for group in self.param_groups:
            check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        self.freeze_step, self.local_step_scaler = freeze_step, local_step_scaler
        self.local_step_clipper = local_step_clipper
        self.variance_scaler = variance_scaler
        self._variance_steps = variance_steps(variance_scaler, freeze_step)
        self._backwards, self._frozen = 0, False
        self._next_sync = freeze_step + 1
        self._travelled: list[float] = [0.0] * len(self.param_groups)

    # ------------------------------------------------------------------ the two policies

    @property
    def synchronised(self) -> bool:
        """Whether the parameters are equal on all ranks now."""
        return not any(self._travelled)

    @property
    def _step_number(self) -> int:
        """The step that is under way, from 1."""
        return self._backwards

    def _averages_gradients(self) -> bool:
        return self._step_number in self._variance_steps

    def _needs_agreement(self) -> bool:
        return self._step_number <= self.freeze_step or self._step_number >= self._next_sync

    def _take_in(self, bucket: Any) -> Any:
        # Backwards are counted, not steps: a rank whose GradScaler skips a local step must stay in time.
        if bucket.index() == 0:
            self._backwards += 1
        return super()._take_in(bucket)

    # ------------------------------------------------------------------ updates

    def _update(self) -> None:
        if self._step_number <= self.freeze_step:
            self._before_freeze()
        else:
            if not self._frozen:
                self._freeze()
            self._local_step()
            if self._step_number >= self._next_sync:
                self._synchronise()

    def _before_freeze(self) -> None:
        exact = self._step_number in self._variance_steps
        if exact:
            for group, parameter in self._grouped():
                if parameter.grad is not None:
                    self._update_both_moments(parameter, group)
        else:
            self._exchange_gradients()
        for group, parameter in self._grouped():
            state = self.state[parameter]
            if parameter.grad is None or not state:
                continue
            self._decay(parameter, group)
            correction = 1 - group["betas"][0] ** float(state["step"])
            real(parameter).add_(state["update"], alpha=-group["lr"] / correction)

    def _update_both_moments(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Adam's moments from the exact mean gradient; the momentum is kept divided by the denominator."""
        beta1, beta2 = group["betas"]
        state, grad = self.state[parameter], real(parameter.grad).float()  # type: ignore[arg-type]
        if not state:
            state["step"], state["updates"] = torch.tensor(0.0), torch.tensor(0.0)
            state["update"], state["variance"] = torch.zeros_like(grad), torch.zeros_like(grad)
            state["denominator"] = torch.full_like(grad, torch.inf)
        state["step"] += 1
        state["updates"] += 1
        never = state["denominator"].isinf()
        momentum = (state["update"] * state["denominator"]).masked_fill_(never, 0).lerp_(grad, 1 - beta1)
        state["variance"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = state["variance"] / (1 - beta2 ** float(state["updates"]))
        state["denominator"] = corrected.sqrt_().add_(group["eps"]).masked_fill_(state["variance"] == 0, torch.inf)
        state["update"] = momentum.div_(state["denominator"])

    def _exchange_gradients(self) -> None:
        """One-bit mean of g / D into the momentum, where the variance stays as it is."""
        scaled: dict[Tensor, Tensor] = {}
        idle: set[Tensor] = set()
        for group, parameter in self._grouped():
            state = self.state[parameter]
            if parameter.grad is None or not state:
                idle.add(parameter)
                scaled[parameter] = torch.zeros_like(real(parameter), dtype=torch.float32)
            else:
                bound = adams_bound(*group["betas"]) / (1 - group["betas"][0])
                scaled[parameter] = (real(parameter.grad).float() / state["denominator"]).clamp_(-bound, bound)
        self.exchange_state.exact = False
        self.exchange_state.exchange(scaled, idle)
        for group, parameter in self._grouped():
            if parameter not in idle:
                state = self.state[parameter]
                state["step"] += 1
                scaled[parameter].masked_fill_(state["denominator"].isinf(), 0)
                state["update"].lerp_(scaled[parameter], 1 - group["betas"][0])

    def _freeze(self) -> None:
        """Begin local steps: what is still owed goes into the momentum, since the memory changes its unit."""
        self._frozen = True
        owed = self.exchange_state.flush()
        for group, parameter in self._grouped():
            state = self.state[parameter]
            if state:
                owed_here = owed[parameter].view_as(state["update"]).masked_fill_(state["denominator"].isinf(), 0)
                state["update"].add_(owed_here, alpha=1 - group["betas"][0])
                state["update"].div_(1 - group["betas"][0] ** float(state["step"]))
                del state["variance"], state["updates"]
            state["anchor"] = parameter.detach().clone()

    def _local_step(self) -> None:
        for number, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            bound = adams_bound(beta1, beta2)
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None:
                    continue
                if "denominator" not in state:
                    raise RuntimeError(
                        f"a parameter of shape {list(parameter.shape)} has its first gradient after freeze_step="
                        f"{self.freeze_step}, so its variance is unknown: unfreeze it earlier, or freeze later"
                    )
                grad = real(parameter.grad).float() / state["denominator"]
                state["update"].lerp_(grad, 1 - beta1).clamp_(-bound, bound)
                self._decay(parameter, group)
                real(parameter).add_(state["update"], alpha=-group["lr"])
            self._travelled[number] += group["lr"]

    def _synchronise(self) -> None:
        ways = {p: real(p - self.state[p]["anchor"]).float() for _, p in self._grouped()}
        self.exchange_state.exact = False
        self.exchange_state.exchange(ways)
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                state = self.state[parameter]
                way = ways[parameter]
                if "denominator" in state:
                    way.masked_fill_(state["denominator"].isinf(), 0)
                    if self._travelled[number] > 0:
                        state["update"].copy_(way).div_(-self._travelled[number])
                        if group["weight_decay"]:
                            state["update"].sub_(real(state["anchor"]), alpha=group["weight_decay"])
                real(state["anchor"]).add_(way)
                parameter.copy_(state["anchor"])
        self._travelled = [0.0] * len(self.param_groups)
        since = self._step_number - self.freeze_step
        self._next_sync = self._step_number + sync_interval(since, self.local_step_scaler, self.local_step_clipper)

    @staticmethod
    def _decay(parameter: Tensor, group: Mapping[str, Any]) -> None:
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])

    # ------------------------------------------------------------------ checkpoint

    def _extra_state(self) -> dict[str, Any]:
        return {
            "backwards": self._backwards,
            "frozen": self._frozen,
            "next_sync": self._next_sync,
            "travelled": list(self._travelled),
        }

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self._backwards, self._frozen = extra["backwards"], extra["frozen"]
        self._next_sync, self._travelled = extra["next_sync"], list(extra["travelled"])
