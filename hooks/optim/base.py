"""What the 1-bit optimisers share: both halves attached by one call, and a common rhythm of backward and step.

While gradients are averaged exactly, `.grad` is the mean over the ranks, as with plain DDP. In the compressed
stage `.grad` stays this rank's own, and `step()` exchanges momenta (or updates) instead: so unscaling, clipping
and logging act on the local gradient, and nothing that is not a gradient ever sits in `.grad`.
"""

# No postponed annotations: this file defines a hook (see hooks/ddp.py).
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from compress.compressor import Compressor
from compress.driver import all_finite
from compress.requests import AllReduce
from hooks.ddp import gradient_views
from hooks.errors import ExchangeError
from hooks.state import GradientBucket, HookState

SEGMENT = 1 << 15
"""Elements handled at a time on CPU: small enough for several tensors' worth to stay in a core's cache."""


def optimizer_hook(optimizer: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication half of a 1-bit optimiser; registered by the optimiser itself.

    Raises:
        TypeError: the state is not such an optimiser.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        raise TypeError(f"optimizer_hook belongs to a 1-bit optimiser, which registers it itself; got {optimizer!r}")
    return optimizer._take_in(bucket)


def adams_bound(beta1: float, beta2: float) -> float:
    """What Adam moves an element at most in one step, in units of lr (Kingma & Ba, 2015, section 2.1): by its first
    gradient after a long time."""
    return max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)


def real(tensor: Tensor) -> Tensor:
    """Complex tensors as pairs of real numbers, all others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of what is kept for a parameter in the compressed stage: float32, or float64 for double."""
    return torch.promote_types(real(tensor).dtype, torch.float32)


def in_cache(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Equally shaped tensors in short flat pieces, so that several passes over a piece cost one through memory.

    On a device, or where a tensor is not contiguous, there is one piece.
    """
    if tensors[0].device.type == "cpu" and all(tensor.is_contiguous() for tensor in tensors):
        return zip(*(tensor.view(-1).split(SEGMENT) for tensor in tensors), strict=True)
    return [tensors]


def stays_put(denominator: Tensor) -> Tensor | None:
    """Which elements never had a gradient, or None if all had one."""
    never = denominator.isinf()
    return never if bool(never.any()) else None


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
        skipped: steps that `step()` left out because a gradient was non-finite, on any rank (in a step without
            communication: on this one). Those that a GradScaler leaves out never reach `step()`.
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
        if "grad_scaler" in options:
            raise TypeError(
                f"{name} takes no grad_scaler: what it exchanges carries no loss scale, since gradients are unscaled "
                "before step(); use the scaler as with any optimiser"
            )
        check_hyperparameters(defaults["lr"], defaults["betas"], defaults["eps"], defaults["weight_decay"])
        trainable = {p for p in model.module.parameters() if p.requires_grad}
        self._complete = False
        super().__init__(trainable_in_order(model) if params is None else params, defaults)
        given = {p for group in self.param_groups for p in group["params"]}
        if given != trainable:
            raise ValueError(
                f"{name} must hold all trainable parameters of the model, since it averages their gradients: "
                f"{len(trainable - given)} are missing, {len(given - trainable)} are not the model's"
            )
        for group in self.param_groups:
            check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        self._complete = True
        self.exchange_state = HookState(compressor, model=model, **options)
        self.exchange_state.exact = True
        self.skipped = 0
        self._arrived = False
        self._exact_step: Any = None
        self._non_finite: bool | Tensor = False
        self._averaged = torch.empty(0)
        self._buffers: list[Tensor] = []
        model.register_comm_hook(self, optimizer_hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor.

        Raises:
            RuntimeError: afterwards, since every trainable parameter of the model is in a group already.
        """
        if getattr(self, "_complete", False):
            raise RuntimeError(
                f"{type(self).__name__} takes its parameter groups when it is made (params=): what DDP does not "
                "average cannot be added later"
            )
        super().add_param_group(param_group)

    # ------------------------------------------------------------------ backward

    def _averages_gradients(self) -> bool:
        """Whether the coming backward averages gradients exactly (else they stay local)."""
        raise NotImplementedError

    def _take_in(self, bucket: dist.GradBucket) -> "Future[Tensor]":
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin()
        self._arrived = True
        if self._averages_gradients():
            self.exchange_state.exact = True
            self._exact_step = self.exchange_state._step
            return self.exchange_state.submit(GradientBucket(gradient_views(bucket), buffer, bucket.is_last()))
        self.exchange_state.raise_if_failed()
        self._buffers.append(buffer)
        if bucket.is_last():
            self._agree_on_finiteness()
            self._buffers.clear()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        future.set_result(buffer)
        return future

    def _begin(self) -> None:
        """The first bucket of a backward."""
        self._exact_step, self._non_finite = None, False
        self._buffers.clear()

    def _agree_on_finiteness(self) -> None:
        """A non-finite gradient on one rank makes those of all ranks NaN, so that all skip the step.

        Where the step is not collective the gradients of each rank decide for that rank alone.
        """
        device = self._buffers[0].device
        verdicts = [torch.as_tensor(all_finite(real(buffer)), device=device) for buffer in self._buffers]
        bad = ~torch.stack(verdicts).all()
        if self._needs_agreement():
            own = torch.tensor(self._also_averaged(), dtype=torch.float64, device=device)
            (mean,) = self.exchange_state.perform(AllReduce((torch.cat((bad.double().reshape(1), own)),)))
            bad = mean[0] > 0
            self._averaged = mean[1:]
            for buffer in self._buffers:
                if device.type != "cpu":
                    buffer.masked_fill_(bad, torch.nan)
                elif bad:
                    buffer.fill_(torch.nan)
        self._non_finite = bad

    def _needs_agreement(self) -> bool:
        """Whether the coming step is collective."""
        return True

    def _also_averaged(self) -> list[float]:
        """Numbers whose mean over the ranks `_averaged` is to be, in the message of the agreement."""
        return []

    def _left_out(self) -> bool:
        """Whether the step under way is to be skipped; waits for a device."""
        if self._exact_step is not None:
            return not bool(self._exact_step.committed)
        return bool(self._non_finite)

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
        if self._left_out():
            self.skipped += 1
        else:
            self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _grouped(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Every parameter with its group."""
        return [(group, parameter) for group in self.param_groups for parameter in group["params"]]

    def _exchange(self, tensors: Mapping[Tensor, Tensor], idle: Collection[Tensor]) -> None:
        """Compressed mean of tensors over the ranks, in place.

        Raises:
            ExchangeError: something was non-finite on some rank, though no gradient was after backward.
        """
        self.exchange_state.exact = False
        if not self.exchange_state.exchange(tensors, idle):
            raise ExchangeError(
                f"{type(self).__name__} had something non-finite to exchange on some rank, though all gradients were "
                "finite after backward: either they were changed before step() (clipping by a non-finite norm?), or "
                "the parameters have diverged; the optimiser cannot go on, resume from a checkpoint"
            )

    def _average_now(self, parameters: list[Tensor]) -> None:
        """Average local gradients exactly: of parameters that are not in the compressed stage yet."""
        if not parameters:
            return
        dtype = torch.float64 if any(wide(p) == torch.float64 for p in parameters) else torch.float32
        means = self.exchange_state.perform(AllReduce(tuple(real(p.grad).to(dtype) for p in parameters)))  # type: ignore[arg-type]
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
            "stage": {"optimizer": type(self).__name__, **self._extra_state(), "skipped": self.skipped},
            "exchange": self.exchange_state.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of this rank, bitwise as if never stopped.

        Raises:
            ValueError: it is not one of this optimiser on this rank; says what differs. Nothing has changed then.
        """
        name = type(self).__name__
        for key in ("stage", "exchange", "state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"the state dict has no {key!r}: it is not one of {name}")
        if state_dict["stage"]["optimizer"] != name:
            raise ValueError(f"the state dict is one of {state_dict['stage']['optimizer']}, not of {name}")
        sizes, mine = ([len(g["params"]) for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if sizes != mine:
            raise ValueError(f"the state dict has groups of {sizes} parameters, this {name} has groups of {mine}")
        saved_states = _in_order(state_dict)
        for number, ((_, parameter), saved) in enumerate(zip(self._grouped(), saved_states, strict=True)):
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != real(parameter).shape:
                    raise ValueError(
                        f"the state dict is of another model: parameter {number} has the shape "
                        f"{list(real(parameter).shape)}, its {key!r} there {list(value.shape)}"
                    )
        self.exchange_state.load_state_dict(state_dict["exchange"])
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        # torch casts state to the parameters' dtype, and shares the counters with the dict that it was given.
        for (_, parameter), saved in zip(self._grouped(), saved_states, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    device = "cpu" if key in HOST_STATE else parameter.device
                    self.state[parameter][key] = value.to(device, copy=True)
        self.skipped = state_dict["stage"]["skipped"]
        self._arrived, self._exact_step, self._non_finite = False, None, False
        self._load_extra_state(state_dict["stage"])


HOST_STATE = ("step", "updates")
"""Counters per parameter, which stay on the host."""


def trainable_in_order(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters that require gradients, as registered."""
    return [parameter for parameter in model.module.parameters() if parameter.requires_grad]


def _in_order(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The saved states of the parameters, group by group."""
    return [state_dict["state"].get(index, {}) for group in state_dict["param_groups"] for index in group["params"]]


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError, naming the argument, unless they are legal for Adam."""
    if not (_is_number(lr) and lr >= 0):
        raise ValueError(f"lr must be a number of at least 0, got {lr!r}")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas must be two numbers with 0 <= beta < 1, got {betas!r}")
    if not (_is_number(eps) and eps > 0):
        raise ValueError(f"eps must be a number greater than 0, got {eps!r}")
    if not (_is_number(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay must be a number of at least 0, got {weight_decay!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: int | None, low: int) -> None:
    """Raise ValueError unless the value is an int of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
