"""What the 1-bit optimisers share: both halves attached by one call, and a common rhythm of backward and step.

While gradients are averaged exactly, `.grad` is the mean over the ranks, as with plain DDP. In the compressed
stage `.grad` stays this rank's own, and `step()` exchanges momenta (or updates) instead: so unscaling, clipping
and logging act on the local gradient, and nothing that is not a gradient ever sits in `.grad`.
"""

# No postponed annotations: this file defines a hook (see hooks/ddp.py).
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from compress.requests import AllReduce
from hooks.ddp import gradient_views
from hooks.state import GradientBucket, HookState


def optimizer_hook(optimizer: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication half of a 1-bit optimiser; registered by the optimiser itself.

    Raises:
        TypeError: the state is not such an optimiser.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        raise TypeError(f"optimizer_hook belongs to a 1-bit optimiser, which registers it itself; got {optimizer!r}")
    return optimizer._take_in(bucket)


def adams_bound(beta1: float, beta2: float) -> float:
    """The most that Adam moves an element in one step, in units of lr (Kingma & Ba, 2015, section 2.1)."""
    return max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)


def real(tensor: Tensor) -> Tensor:
    """Complex tensors as pairs of real numbers, all others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class CompressedOptimizer(torch.optim.Optimizer):
    """Base of the 1-bit optimisers: not to be used itself.

    Args:
        model: the DDP model; must have no communication hook yet.
        params: as in torch: parameters or groups of them, together all trainable ones of the model (default).
        defaults: of the parameter groups.
        compressor: of momenta and updates.
        options: of the HookState (seed, timeout, unit_cap_mb …).

    Attributes:
        exchange_state: the HookState, for statistics.
        skipped: steps that were left out because a gradient was non-finite on some rank.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        compressor: Compressor | str,
        options: Mapping[str, Any],
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{name} needs the DistributedDataParallel model first, not its parameters (got "
                f"{type(model).__name__}): it attaches its own communication hook"
            )
        if getattr(model, "_comm_hooks", None):
            raise RuntimeError(f"{name} brings its own communication hook, but this model has one already")
        trainable = {p for p in model.module.parameters() if p.requires_grad}
        super().__init__(trainable_in_order(model) if params is None else params, defaults)
        given = {p for group in self.param_groups for p in group["params"]}
        if given != trainable:
            raise ValueError(
                f"{name} must hold all trainable parameters of the model, since it averages their gradients: "
                f"{len(trainable - given)} are missing, {len(given - trainable)} are not the model's"
            )
        self.exchange_state = HookState(compressor, model=model, **options)
        self.exchange_state.exact = True
        self.skipped = 0
        self._arrived = False
        self._non_finite = False
        self._buffers: list[Tensor] = []
        model.register_comm_hook(self, optimizer_hook)

    # ------------------------------------------------------------------ backward

    def _averages_gradients(self) -> bool:
        """Whether the coming backward averages gradients exactly (else they stay local)."""
        raise NotImplementedError

    def _take_in(self, bucket: dist.GradBucket) -> "Future[Tensor]":
        self._arrived = True
        if self._averages_gradients():
            self._non_finite = False
            self.exchange_state.exact = True
            return self.exchange_state.submit(GradientBucket(gradient_views(bucket), bucket.buffer(), bucket.is_last()))
        self.exchange_state.raise_if_failed()
        self._buffers.append(bucket.buffer())
        if bucket.is_last():
            self._agree_on_finiteness()
            self._buffers.clear()
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    def _agree_on_finiteness(self) -> None:
        """A non-finite gradient on one rank makes those of all ranks NaN, so that all skip the step."""
        if not self._needs_agreement():
            return
        finite = torch.stack([buffer.isfinite().all() for buffer in self._buffers]).all()
        (bad,) = self.exchange_state.perform(AllReduce(((~finite).float().reshape(1),)))
        self._non_finite = bool(bad > 0)
        if self._non_finite:
            for buffer in self._buffers:
                buffer.fill_(torch.nan)

    def _needs_agreement(self) -> bool:
        """Whether the coming step is collective."""
        return True

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange and update.

        Raises:
            RuntimeError: no backward of the DDP model has come before.
            ExchangeError: the exchange failed, here or on a peer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._arrived:
            raise RuntimeError(
                f"{type(self).__name__}.step() without gradients from its DDP model: run forward and backward "
                "through the DistributedDataParallel model (the last micro-batch outside no_sync())"
            )
        self._arrived = False
        if self._non_finite:
            self.skipped += 1
        else:
            self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _grouped(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Every parameter with its group."""
        return [(group, parameter) for group in self.param_groups for parameter in group["params"]]

    def _average_now(self, parameters: list[Tensor]) -> None:
        """Average local gradients exactly: of parameters that are not in the compressed stage yet."""
        if not parameters:
            return
        means = self.exchange_state.perform(AllReduce(tuple(real(p.grad).float() for p in parameters)))  # type: ignore[arg-type]
        for parameter, mean in zip(parameters, means, strict=True):
            real(parameter.grad).copy_(mean)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ checkpoint

    def _extra_state(self) -> dict[str, Any]:
        """Numbers and strings besides the tensors per parameter."""
        raise NotImplementedError

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the error memories of this rank: save one per rank. Loads with weights_only=True."""
        return {
            **super().state_dict(),
            "stage": {**self._extra_state(), "skipped": self.skipped},
            "exchange": self.exchange_state.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of this rank, bitwise as if never stopped.

        Raises:
            ValueError: it is not one of this optimiser on this rank; says what differs.
        """
        for key in ("stage", "exchange"):
            if key not in state_dict:
                raise ValueError(f"the state dict has no {key!r}: it is not one of {type(self).__name__}")
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        # torch casts state to the parameters' dtype; frozen denominators and updates are float32.
        for parameter, saved in zip((p for _, p in self._grouped()), _in_order(state_dict), strict=True):
            for name, value in saved.items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
        self.skipped = state_dict["stage"]["skipped"]
        self._load_extra_state(state_dict["stage"])
        self.exchange_state.load_state_dict(state_dict["exchange"])


def trainable_in_order(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters that require gradients, as registered."""
    return [parameter for parameter in model.module.parameters() if parameter.requires_grad]


def _in_order(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The saved states of the parameters, group by group."""
    return [state_dict["state"].get(index, {}) for group in state_dict["param_groups"] for index in group["params"]]


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError, naming the argument, unless they are legal for Adam."""
    if not (isinstance(lr, (int, float)) and lr >= 0):
        raise ValueError(f"lr must be a number of at least 0, got {lr!r}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers with 0 <= beta < 1, got {betas!r}")
    if not eps > 0:
        raise ValueError(f"eps must be greater than 0, got {eps!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}")


def check_count(name: str, value: int | None, low: int) -> None:
    """Raise ValueError unless the value is an int of at least `low`, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
