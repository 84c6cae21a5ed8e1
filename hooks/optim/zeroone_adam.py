"""0/1 Adam: one bit when it communicates, and ever more steps in which it does not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from hooks.optim.base import CompressedOptimizer, adams_bound, check_count, in_cache, real, stays_put, wide


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
    after every synchronisation; **between synchronisations they differ**: evaluate only when `synchronised`. A
    checkpoint made in between holds this rank's parameters too, and loading it puts them back.

    Args:
        model: the DDP model; the optimiser registers its communication hook.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW (weight decay is decoupled).
        freeze_step: step after which the variance is frozen and local steps begin.
        variance_scaler: updates of the variance after which the gap between them doubles.
        local_step_scaler: steps after which the interval between synchronisations doubles.
        local_step_clipper: longest interval between synchronisations, in steps.
        params, compressor, options: as in OneBitAdam.

    On the wire: dense at the steps of the variance policy, the compressor's at the others before the freeze and at
    synchronisations after it, nothing in between. Once, at the freeze, what is still owed is sent dense, since
    the memory then changes its meaning.

    For `.grad` and non-finite gradients see OneBitAdam. A step that all ranks leave out does not count for the
    two policies; a rank may leave out a local step by itself, and the others go on.

    A parameter of half precision has its anchor and its way from there in float32, in which small steps are
    not lost.
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
        for name, value in (
            ("freeze_step", freeze_step),
            ("variance_scaler", variance_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            check_count(name, value, 1)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, params, defaults, compressor, options)
        self.freeze_step, self.local_step_scaler = freeze_step, local_step_scaler
        self.local_step_clipper = local_step_clipper
        self.variance_scaler = variance_scaler
        self._variance_steps = variance_steps(variance_scaler, freeze_step)
        self._backwards, self._frozen = 0, False
        self._next_sync = freeze_step + 1
        self._synchronised = True
        self._never: dict[Tensor, Tensor | None] = {}

    # ------------------------------------------------------------------ the two policies

    @property
    def synchronised(self) -> bool:
        """Whether the parameters are equal on all ranks now."""
        return self._synchronised

    def _averages_gradients(self) -> bool:
        return self._backwards in self._variance_steps

    def _needs_agreement(self) -> bool:
        return self._backwards <= self.freeze_step or self._backwards >= self._next_sync

    def _also_averaged(self) -> list[float]:
        if self._backwards <= self.freeze_step:
            return []
        return [self.state[parameter].get("travelled", 0.0) for _, parameter in self._grouped()]

    def _begin(self) -> None:
        # Backwards are counted, not steps: a rank whose GradScaler skips a local step must stay in time.
        self._take_back()
        super()._begin()
        self._backwards += 1
        if self._backwards > self.freeze_step:
            self._synchronised = False

    def _take_back(self) -> None:
        """Do not count the last backward if all ranks left its step out."""
        if self._left_out() and self._needs_agreement():
            self._backwards -= 1
        self._exact_step, self._non_finite = None, False

    # ------------------------------------------------------------------ updates

    def _update(self) -> None:
        if self._backwards <= self.freeze_step:
            self._before_freeze()
        if self._backwards >= self.freeze_step and not self._frozen:
            self._freeze()
        if self._backwards > self.freeze_step:
            self._local_step()
            if self._backwards >= self._next_sync:
                self._synchronise()

    def _before_freeze(self) -> None:
        if self._averages_gradients():
            for group, parameter in self._grouped():
                if parameter.grad is not None:
                    self._update_both_moments(parameter, group)
        else:
            self._exchange_gradients()
        for group, parameter in self._grouped():
            state = self.state[parameter]
            if parameter.grad is None or not state:
                continue
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            correction = 1 - group["betas"][0] ** float(state["step"])
            real(parameter).add_(state["update"], alpha=-group["lr"] / correction)

    def _update_both_moments(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Adam's moments from the exact mean gradient; the momentum is kept divided by the denominator."""
        beta1, beta2 = group["betas"]
        state, grad = self.state[parameter], real(parameter.grad).to(wide(parameter))  # type: ignore[arg-type]
        if not state:
            state["step"], state["updates"] = torch.tensor(0.0), torch.tensor(0.0)
            state["update"], state["variance"] = torch.zeros_like(grad), torch.zeros_like(grad)
            state["denominator"] = torch.full_like(grad, torch.inf)
        state["step"] += 1
        state["updates"] += 1
        correction = 1 - beta2 ** float(state["updates"])
        for update, g, variance, denominator in in_cache(
            state["update"], grad, state["variance"], state["denominator"]
        ):
            momentum = update.mul_(denominator).masked_fill_(denominator.isinf(), 0).lerp_(g, 1 - beta1)
            variance.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            torch.div(variance, correction, out=denominator).sqrt_().add_(group["eps"])
            momentum.div_(denominator.masked_fill_(variance == 0, torch.inf))

    def _exchange_gradients(self) -> None:
        """One-bit mean of g / D into the momentum, where the variance stays as it is."""
        scaled: dict[Tensor, Tensor] = {}
        idle: set[Tensor] = set()
        for group, parameter in self._grouped():
            state = self.state[parameter]
            if parameter.grad is None or not state:
                idle.add(parameter)
                scaled[parameter] = torch.zeros_like(real(parameter), dtype=wide(parameter))
            else:
                # So that no single gradient moves an element by more than Adam could, bias correction included.
                beta1, beta2 = group["betas"]
                share = (1 - beta1) / (1 - beta1 ** (float(state["step"]) + 1))
                bound = adams_bound(beta1, beta2) / share
                scaled[parameter] = (real(parameter.grad) / state["denominator"]).clamp_(-bound, bound)
        self._exchange(scaled, idle)
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
                self._never[parameter] = stays_put(state["denominator"])
            state["anchor"] = real(parameter).to(wide(parameter), copy=True)
            state["travelled"] = 0.0
            if wide(parameter) != real(parameter).dtype:
                state["way"] = torch.zeros_like(state["anchor"])

    def _local_step(self) -> None:
        for group, parameter in self._grouped():
            state, (beta1, beta2) = self.state[parameter], group["betas"]
            if parameter.grad is None:
                continue
            if "denominator" not in state:
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has its first gradient after freeze_step="
                    f"{self.freeze_step}, so its variance is unknown: unfreeze it earlier, or freeze later"
                )
            bound, lr, weight_decay = adams_bound(beta1, beta2), group["lr"], group["weight_decay"]
            # Half precision: the way in float32, from which the parameter follows. Else it is parameter - anchor.
            followed = state.get("way", real(parameter))
            for update, g, denominator, p, way in in_cache(
                state["update"], real(parameter.grad), state["denominator"], real(parameter), followed
            ):
                update.mul_(beta1).addcdiv_(g, denominator, value=1 - beta1).clamp_(-bound, bound)
                if weight_decay:
                    way.add_(p, alpha=-lr * weight_decay)
                way.add_(update, alpha=-lr)
            if "way" in state:
                real(parameter).copy_(state["anchor"] + state["way"])
            state["travelled"] += lr

    def _synchronise(self) -> None:
        # The agreement brought how far the ranks have come on average before this step, which all of them took.
        before = dict(zip((p for _, p in self._grouped()), self._averaged.tolist(), strict=True))
        travelled = {p: before[p] + group["lr"] * (p.grad is not None) for group, p in self._grouped()}
        ways = {p: self._way(p, moved=travelled[p] > 0) for _, p in self._grouped()}
        self._exchange(ways, idle={p for p in ways if travelled[p] == 0})
        for group, parameter in self._grouped():
            state, weight_decay = self.state[parameter], group["weight_decay"]
            state["travelled"] = 0.0
            if "denominator" not in state or not self.exchange_state.used_by_any(parameter):
                continue
            never = self._never[parameter]
            if never is not None:
                ways[parameter].masked_fill_(never, 0)
            for way, anchor, p in in_cache(ways[parameter], state["anchor"], real(parameter)):
                decay = anchor * weight_decay if weight_decay else None
                p.copy_(anchor.add_(way))
                if travelled[parameter] > 0:  # the way is the momentum's storage, and becomes the momentum
                    way.div_(-travelled[parameter])
                    if decay is not None:
                        way.sub_(decay)
            if never is not None and weight_decay:
                state["update"].masked_fill_(never, 0)
            if "way" in state:
                state["way"].zero_()
        since = self._backwards - self.freeze_step
        self._next_sync = self._backwards + sync_interval(since, self.local_step_scaler, self.local_step_clipper)
        self._synchronised = True

    def _way(self, parameter: Tensor, moved: bool) -> Tensor:
        """How far this rank has come from the anchor, in the place of the momentum if some rank has moved."""
        state = self.state[parameter]
        if not moved:
            return torch.zeros_like(state["anchor"])
        if "way" in state:
            state["update"].copy_(state["way"])
        else:
            torch.sub(real(parameter), state["anchor"], out=state["update"])
        never = self._never[parameter]
        return state["update"] if never is None else state["update"].masked_fill_(never, 0)

    # ------------------------------------------------------------------ checkpoint

    def _extra_state(self) -> dict[str, Any]:
        # Between synchronisations each rank has parameters of its own, which DDP would overwrite with rank 0's.
        own = {} if self._synchronised else {str(i): p.detach().clone() for i, (_, p) in enumerate(self._grouped())}
        return {
            "backwards": self._backwards - (self._left_out() and self._needs_agreement()),
            "frozen": self._frozen,
            "next_sync": self._next_sync,
            "synchronised": self._synchronised,
            "parameters": own,
        }

    @torch.no_grad()
    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self._backwards, self._frozen = extra["backwards"], extra["frozen"]
        self._next_sync, self._synchronised = extra["next_sync"], extra["synchronised"]
        for number, (_, parameter) in enumerate(self._grouped()):
            if str(number) in extra["parameters"]:
                parameter.copy_(extra["parameters"][str(number)])
            if self._frozen and "denominator" in self.state[parameter]:
                self._never[parameter] = stays_put(self.state[parameter]["denominator"])
