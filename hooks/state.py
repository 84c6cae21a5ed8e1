"""HookState: everything that one model's compressed gradient exchange keeps on one rank."""

import hashlib
import platform
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import compress
from compress.compressor import Compressor, Context, State
from compress.driver import Carry, Outcome, commit, drive, exchange_unit
from compress.exact import Exact
from compress.options import parse
from compress.requests import Replies, Request
from compress.state import drain_servers
from hooks.agreement import check_agreement, check_replicas
from hooks.channel import Channel, lane_groups, open_channel
from hooks.checkpoint import load_units, save_units
from hooks.errors import ExchangeError
from hooks.lane import StreamLane, ThreadLane, make_lane
from hooks.telemetry import Stats, StepStats
from hooks.transport import Transport
from hooks.units import NamedParameter, Unit, plan_units

Perform = Callable[[Request], Replies]


@dataclass
class GradientBucket:
    """Gradients that became ready together, from whatever source.

    Args:
        gradients: parameter -> its local gradient, a real view of the parameter's shape (complex: one axis
            of 2 more); the mean is written into it.
        result: what the Future of this bucket is completed with.
        last: whether no further bucket follows in this step.
    """

    gradients: Mapping[Tensor, Tensor]
    result: Tensor
    last: bool


@dataclass
class _Pending:
    """A bucket whose units are not all done."""

    waiting: set[int]
    future: "Future[Tensor]"
    result: Tensor


@dataclass
class _Step:
    """One backward's exchange, while it runs."""

    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    order: list[list[Tensor]] = field(default_factory=list)
    buckets: list[tuple[GradientBucket, "Future[Tensor]"]] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    launched: int = 0
    exact: bool = False
    scale: float | Tensor = 1.0
    committed: bool | Tensor = False
    stats: StepStats = field(default_factory=StepStats)


class HookState:
    """Compressor, error memory, statistics and the ordered lane of one model on one rank.

    Creating one is collective: all ranks of the group must do it, in the same order.

    Args:
        compressor: a compressor or its spec, such as "powersgd:rank=4".
        model: the DDP model, or the module it wraps. Gives parameters their names and DDP its group; without
            it the state learns the parameters in the first step and knows them by their order.
        process_group: the ranks to average over; the model's, if it is a DDP model, else all.
        seed: of the numbers that all ranks share; must be equal on all.
        error_feedback: keep what was not sent and add it to the next gradient.
        unit_cap_mb: MiB of gradient exchanged at a time. Smaller units overlap more of backward and cost
            more messages; results do not depend on DDP's own buckets.
        timeout: seconds that a collective waits for a peer before it raises.
        grad_scaler: the torch.amp.GradScaler in use, if any: memory is then kept in unscaled units, so that a
            change of the loss scale does not change what is owed.
        transport: wraps the function that performs requests, to observe or delay them.

    Attributes:
        stats: bytes, messages and seconds of the last step and in total.
        error: the exception that ended this state's work, if any.
        exact: while true, steps are averaged exactly and leave memory and state as they are. Must be set
            alike on all ranks, between steps.

    Raises:
        TypeError, ValueError: an argument is unusable; the message names it and the remedy.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        error_feedback: bool = True,
        unit_cap_mb: float = 25.0,
        timeout: float = 300.0,
        grad_scaler: torch.amp.GradScaler | None = None,
        transport: Callable[[Perform], Perform] | None = None,
    ) -> None:
        self._lane: ThreadLane | StreamLane | None = None
        self._channel: Channel | None = None
        self.compressor = parse(compressor) if isinstance(compressor, str) else compressor
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"compressor must be a Compressor or a spec such as 'powersgd:rank=4', got {compressor!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}")
        for name, value in (("unit_cap_mb", unit_cap_mb), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group() before making a state")
        self.seed, self.error_feedback, self.unit_cap_mb = seed, error_feedback, float(unit_cap_mb)
        self._names: dict[Tensor, str] | None = None
        self._may_be_unused = True
        parent = self._choose_group(model, process_group)
        self.timeout = float(timeout)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
        self._grad_scaler = grad_scaler
        self.rank, self.peers = dist.get_rank(parent), dist.get_world_size(parent)
        self._channel = open_channel(parent, self.timeout) if self.peers > 1 else None
        if self._channel is not None:
            weakref.finalize(self, self._channel.close).atexit = False
        self._transport = Transport(self._channel)
        self._perform: Perform = transport(self._transport) if transport else self._transport
        self.stats = Stats()
        self.error: BaseException | None = None
        self.exact = False
        self._failure = ""
        self._units: list[Unit] | None = None
        self._registered: list[NamedParameter] = []
        self._unit_of: dict[Tensor, int] = {}
        self._results: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._used: set[Tensor] = set()
        self._used_by_any: dict[Tensor, Tensor] = {}
        self._usage_hooks: list[Any] = []
        self._step_number = 0
        self._step = _Step()
        self._checkpoint: Mapping[str, Any] | None = None
        if model is not None:
            self.bind(model)

    # ------------------------------------------------------------------ who and where

    def _choose_group(
        self, model: torch.nn.Module | None, process_group: dist.ProcessGroup | None
    ) -> dist.ProcessGroup | None:
        """The ranks to average over.

        Raises:
            ValueError: the group is not the DDP model's, or cannot be known.
        """
        models_group = getattr(model, "process_group", None)
        if process_group is None and models_group is None:
            others = set(dist.distributed_c10d._world.pg_names.values()) - lane_groups
            others.discard(dist.group.WORLD.group_name)  # type: ignore[union-attr]
            if others and model is None:
                raise ValueError(
                    "process groups other than the default exist, so this state cannot know which ranks its model "
                    "averages over: pass model= (or use hooks.register) or process_group="
                )
            return None
        if process_group is None:
            return models_group
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group: this rank is not a member of the given group")
        if models_group is not None:
            given, models = (dist.get_process_group_ranks(group) for group in (process_group, models_group))
            if given != models:
                raise ValueError(
                    f"process_group has the ranks {given}, but the DDP model's group has {models}: the gradients would "
                    "be averaged over the wrong ranks; leave process_group out, or give DDP the same group"
                )
        return process_group

    def bind(self, model: torch.nn.Module) -> "HookState":
        """Tell the state its model: parameters are then known by their names. Returns the state.

        Raises:
            RuntimeError: the state is at work already.
        """
        if self._units is not None:
            raise RuntimeError("bind() must come before the first step")
        module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self._names = {parameter: name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()}
        # Only then does DDP throw the result of a parameter away that no rank used.
        self._may_be_unused = bool(getattr(model, "find_unused_parameters", True))
        return self

    def _description(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {
            "compressor": str(self.compressor),
            "options": [
                f"seed={self.seed}",
                f"error_feedback={self.error_feedback}",
                f"unit_cap_mb={self.unit_cap_mb}",
            ],
            "versions": [
                f"gradwire {compress.__version__}",
                f"torch {torch.__version__}",
                f"numpy {np.__version__}",
                f"machine {platform.machine()}",
            ],
            "step": self._step_number,
            "parameters": [
                f"{each.name} {list(each.tensor.shape)} {str(each.tensor.dtype).removeprefix('torch.')}"
                for each in self._registered
            ],
        }

    # ------------------------------------------------------------------ one step

    def submit(self, bucket: GradientBucket, used: Callable[[Tensor], bool] | None = None) -> "Future[Tensor]":
        """Take in a bucket; its Future is completed when all its gradients hold the mean.

        Args:
            used: whether a parameter took part in this rank's backward; by default watched by tensor hooks
                where it can vary.

        Raises:
            ExchangeError: an earlier exchange failed.
            AgreementError: the ranks differ (first step).
            ValueError: the bucket is not one of this state's model.
        """
        self.raise_if_failed()
        device = bucket.result.device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        step = self._step
        if not step.buckets and not step.pending:
            step.exact, step.scale = self.exact, self._loss_scale(device)
        step.buckets.append((bucket, future))
        step.gradients.update(bucket.gradients)
        step.order.append(list(bucket.gradients))
        try:
            if self._units is None and bucket.last:
                self._plan(step, watch=used is None)
            if self._units is not None:
                self._launch(step, used or self._used.__contains__)
        except BaseException as error:
            self.error, self._failure = error, f"rank {self.rank} could not begin: {error}"
            raise
        if bucket.last:
            self._used.clear()
            self._step = _Step()
        return future.then(self._check_failure)

    def _loss_scale(self, device: torch.device) -> float | Tensor:
        """The factor that this step's gradients carry; on CUDA as a tensor, not to wait for the device."""
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return 1.0
        on_device = self._grad_scaler._get_scale_async() if device.type == "cuda" else None
        return self._grad_scaler.get_scale() if on_device is None else on_device

    def _plan(self, step: _Step, watch: bool) -> None:
        """Fix parameters and units from what the first step brought; compare notes with the other ranks."""
        self._registered = self._registration_order(step)
        if self.compressor.needs_names and self._names is None:
            raise ValueError(
                f"{self.compressor} chooses by parameter names, which this state does not know: make it with "
                "hooks.register(ddp_model, …), pass model=, or call state.bind(ddp_model)"
            )
        checkpoint = self._checkpoint
        if checkpoint is not None:
            self._step_number = checkpoint["step"]
            if self._names is None:
                self._adopt_names([name for name, _, _ in checkpoint["parameters"]])
        check_agreement(self._description(), self._perform, self._transport)
        self._make_units()
        assert self._units is not None
        if checkpoint is not None:
            load_units(self._units, self._registered, checkpoint)
            self._checkpoint = None
        self._lane = make_lane(self._units[0].device)
        if self._may_be_unused and watch:
            for each in self._registered:
                self._usage_hooks.append(each.tensor.register_hook(self._watch(each.tensor)))
                self._used.add(each.tensor)  # nobody watched this first backward

    def _make_units(self) -> None:
        self._units = plan_units(
            self._registered,
            self.compressor,
            self.unit_cap_mb,
            peers=self.peers,
            rank=self.rank,
            seed=self.seed,
            error_feedback=self.error_feedback,
        )
        self._unit_of = {parameter: unit.index for unit in self._units for parameter in unit.parameters}
        # One result for all units of a kind: each is written into the gradients before the next begins.
        self._results.clear()
        for unit in sorted(self._units, key=lambda each: each.layout.numel):
            self._results[unit.layout.dtype, unit.device] = torch.empty_like(unit.carry.spare)

    def _watch(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._used.add(parameter)

        return note

    def _registration_order(self, step: _Step) -> list[NamedParameter]:
        """The step's parameters as the model registered them.

        Without names: a bucket lists its parameters in that order, and several come last parameters first.
        """
        arrived = [parameter for bucket in reversed(step.order) for parameter in bucket]
        if self._names is None:
            return [NamedParameter(str(number), parameter) for number, parameter in enumerate(arrived)]
        strangers = [parameter for parameter in arrived if parameter not in self._names]
        if strangers:
            raise ValueError(
                f"a parameter of shape {list(strangers[0].shape)} is not one of the model this state was made for: "
                "each model needs a state of its own"
            )
        present = set(arrived)
        return [NamedParameter(name, parameter) for parameter, name in self._names.items() if parameter in present]

    def _adopt_names(self, names: list[str]) -> None:
        self._registered = [
            NamedParameter(name, each.tensor) for name, each in zip(names, self._registered, strict=False)
        ]

    def _launch(self, step: _Step, used: Callable[[Tensor], bool]) -> None:
        """Send every unit that is complete to the lane, in the order of the units; never out of order."""
        assert self._units is not None
        assert self._lane is not None
        for bucket, future in step.buckets:
            strangers = [parameter for parameter in bucket.gradients if parameter not in self._unit_of]
            if strangers:
                raise ValueError(
                    f"a parameter of shape {list(strangers[0].shape)} is not one this state has seen before: "
                    "each model needs a state of its own"
                )
            units = {self._unit_of[parameter] for parameter in bucket.gradients}
            step.pending.append(_Pending(units, future, bucket.result))
            if not units:
                future.set_result(bucket.result)
        step.buckets.clear()
        while step.launched < len(self._units):
            unit = self._units[step.launched]
            if any(parameter not in step.gradients for parameter in unit.parameters):
                return
            flags = [float(used(parameter)) for parameter in unit.parameters] if self._may_be_unused else None
            step.launched += 1
            self._lane.submit(lambda unit=unit, flags=flags: self._run(unit, step, flags))  # type: ignore[misc]

    def _run(self, unit: Unit, step: _Step, used: list[float] | None) -> None:
        """The lane's job: exchange one unit. Never raises; a failure reaches backward through the futures."""
        try:
            if not self._failure:
                self._exchange(unit, step, used)
        except BaseException as error:
            self._fail(unit, error)
        for pending in step.pending:
            if unit.index in pending.waiting:
                pending.waiting.discard(unit.index)
                if not pending.waiting:
                    pending.future.set_result(pending.result)

    def _exchange(self, unit: Unit, step: _Step, used: list[float] | None) -> None:
        assert self._units is not None
        flags = None if used is None else torch.tensor(used, device=unit.device)
        gradients = [step.gradients[parameter] for parameter in unit.parameters]
        slots, stats = unit.layout.slots, step.stats
        ctx = self._context(unit)

        def load(out: Tensor, memory: Tensor | None) -> None:
            for slot, gradient in zip(slots, gradients, strict=True):
                if memory is None:
                    slot.view(out).copy_(gradient)
                else:
                    torch.add(slot.view(memory), gradient, out=slot.view(out))

        def load_unscaled(out: Tensor, memory: Tensor | None) -> None:
            load(out, None)
            out.div_(step.scale)
            if memory is not None:
                out.add_(memory)

        last_reply = started = time.perf_counter()
        communicating = 0.0

        def perform(request: Request) -> Replies:
            nonlocal last_reply, communicating
            asked = time.perf_counter()
            replies = self._perform(request)
            last_reply = time.perf_counter()
            communicating += last_reply - asked
            stats.count(request, self.peers)
            return replies

        scaled = self._grad_scaler is not None
        compressor: Compressor
        if step.exact:
            compressor, carry = Exact(), Carry(State(), None, unit.carry.spare)
        else:
            compressor, carry = self.compressor, unit.carry
        outcome = drive(exchange_unit(compressor, load_unscaled if scaled else load, carry, ctx, flags), perform)
        if scaled:
            outcome.mean.mul_(step.scale)
        for slot, gradient in zip(slots, gradients, strict=True):
            gradient.copy_(slot.view(outcome.mean))
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            outcome = replace(outcome, finite=outcome.finite & _all_finite(gradients))
        step.outcomes.append(outcome)
        if unit.index == len(self._units) - 1:
            self._commit(step)
        stats.dense_bytes += unit.layout.dense_bytes
        stats.communicate_seconds += communicating
        stats.encode_seconds += last_reply - started - communicating
        stats.decode_seconds += time.perf_counter() - last_reply
        if unit.index == len(self._units) - 1:
            self.stats.finish(stats)

    def _commit(self, step: _Step) -> None:
        """All units or none: a step that anyone must skip leaves no trace."""
        assert self._units is not None
        verdicts = [outcome.finite for outcome in step.outcomes]
        if any(isinstance(verdict, Tensor) for verdict in verdicts):
            accept: bool | Tensor = torch.stack([torch.as_tensor(verdict) for verdict in verdicts]).all()
        else:
            accept = all(verdicts)
        self._used_by_any = {}
        for unit, outcome in zip(self._units, step.outcomes, strict=True):
            if outcome.used is not None:
                self._used_by_any |= zip(unit.parameters, outcome.used, strict=True)
            if not step.exact:
                commit(unit.carry, outcome, accept, unit.layout)
        step.committed = accept
        # On a device the host does not know whether the step was skipped; all ranks count it alike.
        if accept is False:
            self.stats.skipped += 1
        else:
            self._step_number += 1

    def _context(self, unit: Unit) -> Context:
        arena = self._results[unit.layout.dtype, unit.device][: unit.layout.numel]
        salt = f"unit{unit.index}."
        return Context(
            unit.layout, self.peers, self.rank, self._step_number, self.seed, unit.device, salt=salt, arena=arena
        )

    # ------------------------------------------------------------------ failure

    def _fail(self, unit: Unit, error: BaseException) -> None:
        names = ", ".join(slot.spec.name for slot in unit.layout.slots[:3])
        self._failure = (
            f"gradient exchange failed on rank {self.rank} in unit {unit.index} ({names}, …) during "
            f"{self._transport.doing}: {type(error).__name__}: {error}\n"
            + "".join(traceback.format_exception(type(error), error, error.__traceback__))
        )
        self.error = error
        if self._channel is not None:
            self._channel.close(abort=True)  # so that peers fail now, not after the time-out

    def _check_failure(self, future: "Future[Tensor]") -> Tensor:
        self.raise_if_failed()
        return future.value()

    def raise_if_failed(self) -> None:
        """Raise ExchangeError, caused by the original exception, if an exchange has failed."""
        if self._failure:
            raise ExchangeError(self._failure) from self.error

    # ------------------------------------------------------------------ what optimisers ask

    def exchange(self, tensors: Mapping[Tensor, Tensor], idle: Collection[Tensor] = ()) -> bool:
        """Replace a tensor of each parameter by the compressed mean over the ranks, and wait for it.

        What a communication hook does to gradients, for anything else that has the parameters' shapes: momenta,
        accumulated updates. Collective; the parameters must be those of the first step.

        Args:
            tensors: parameter -> tensor of its shape, changed in place.
            idle: parameters that take no part this time: if they are idle on all ranks, what is owed to them
                stays as it is. Only where the model may leave parameters unused (find_unused_parameters).

        Returns:
            False if something was non-finite on some rank: the tensors are then NaN and no memory has changed.
        """
        step = self._step
        real = {p: torch.view_as_real(each) if each.is_complex() else each for p, each in tensors.items()}
        result = next(iter(tensors.values()), torch.empty(0))
        self.submit(GradientBucket(real, result, last=True), used=lambda each: each not in idle).wait()
        return bool(step.committed)

    def perform(self, request: Request) -> Replies:
        """Carry out one collective on the state's own group, between steps and outside the statistics."""
        return self._perform(request)

    def flush(self) -> dict[Tensor, Tensor]:
        """Deliver now, exactly, what is still owed: parameter -> the mean of all memories plus the server memory.

        Afterwards nothing is owed. Collective; call it between steps.

        Raises:
            RuntimeError: before the first step.
        """
        owed: dict[Tensor, Tensor] = {}
        for unit in self._planned():
            total = unit.carry.spare.zero_() if unit.carry.memory is None else unit.carry.spare.copy_(unit.carry.memory)
            state = drain_servers(unit.carry.state, unit.layout, total, weight=self.peers)
            mean, _ = drive(Exact().exchange(total, State(), self._context(unit)), self._perform)
            owed |= {p: slot.view(mean).clone() for p, slot in zip(unit.parameters, unit.layout.slots, strict=True)}
            unit.carry.state = state
            if unit.carry.memory is not None:
                unit.carry.memory.zero_()
        return owed

    def switch(self, compressor: Compressor | str) -> None:
        """Go on with another compressor, or with "none"; collective, between steps. What is owed stays owed.

        Raises:
            ValueError: the new compressor needs parameter names and the state has none.
        """
        chosen = parse(compressor) if isinstance(compressor, str) else compressor
        if chosen.needs_names and self._names is None:
            raise ValueError(f"{chosen} chooses by parameter names, which this state does not know: pass model=")
        if self._units is None:
            self.compressor = chosen
            return
        owed = self.flush()
        self.compressor = chosen
        check_agreement(self._description(), self._perform, self._transport)
        self._make_units()
        for unit in self._units:
            unit.carry.owe(
                torch.cat([torch.empty(0, device=unit.device), *(owed[p].reshape(-1) for p in unit.parameters)])
            )

    def checksum(self) -> str:
        """A digest of the parameters, the same on all ranks as long as the replicas are equal; collective.

        Raises:
            ReplicaError: they are not; names the ranks that differ from most, and the first parameter that does.
            RuntimeError: before the first step.
        """
        self._planned()
        digests = {
            each.name: hashlib.blake2b(_octets(each.tensor), digest_size=8).hexdigest() for each in self._registered
        }
        check_replicas(digests, self._perform, self._transport)
        return hashlib.blake2b("".join(digests.values()).encode(), digest_size=8).hexdigest()

    # ------------------------------------------------------------------ what users ask

    def formula_bytes(self) -> int:
        """Wire bytes this worker sends in the next step by the compressors' own formulas, flags included.

        Raises:
            RuntimeError: before the first step, when the parameters are not known.
        """
        total = 0.0
        for unit in self._planned():
            ctx = self._context(unit)
            compressor = Exact() if self.exact else self.compressor
            rounds = compressor.rounds(ctx)
            total += compressor.wire_bytes(ctx)
            if rounds:
                kind, flags = rounds[0][0], 1 + self._may_be_unused * len(unit.layout.slots)
                itemsize = unit.layout.itemsize if kind.kind == "all_reduce" else 4
                copies = self.peers if kind.kind == "all_to_all" else 1
                total += kind.factor(self.peers) * flags * itemsize * copies
        return round(total)

    def used_by_any(self, parameter: Tensor) -> bool:
        """Whether some rank used the parameter in the last step; true where that is not watched."""
        used = self._used_by_any.get(parameter)
        return used is None or bool(used)

    def memory(self) -> dict[str, Tensor]:
        """This rank's error memory by parameter name, fp32 (fp64 for double parameters); clones.

        Raises:
            RuntimeError: before the first step.
        """
        return {
            slot.spec.name: slot.view(unit.carry.memory).clone()
            for unit in self._planned()
            if unit.carry.memory is not None
            for slot in unit.layout.slots
        }

    def _planned(self) -> list[Unit]:
        if self._units is None:
            raise RuntimeError("the parameters are not known before the first step")
        return self._units

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: plain tensors, numbers and strings, keyed by parameter name.

        Loads with torch.load(weights_only=True). Every rank's is different: save them all. To resume on
        another number of ranks, `hooks.merge_state_dicts` makes one out of all.
        """
        if self._units is None:
            if self._checkpoint is not None:
                return dict(self._checkpoint)
            return {}
        return save_units(self._units, self._registered, self._header())

    def _header(self) -> dict[str, Any]:
        return {
            "format": 1,
            "version": compress.__version__,
            "compressor": str(self.compressor),
            "seed": self.seed,
            "step": self._step_number,
            "world_size": self.peers,
            "rank": self.rank,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; takes effect in the next step.

        Raises:
            ValueError: it is of another compressor, seed, format, world size or rank; says which.
        """
        if not state_dict:
            return
        header = self._header()
        for key in ("format", "compressor", "seed"):
            if state_dict.get(key) != header[key]:
                raise ValueError(f"the checkpoint has {key} {state_dict.get(key)!r}, this state has {header[key]!r}")
        if state_dict["world_size"] is not None:
            if state_dict["world_size"] != self.peers:
                raise ValueError(
                    f"the checkpoint was saved by {state_dict['world_size']} ranks, now there are {self.peers}: "
                    "combine the state dicts of all ranks with hooks.merge_state_dicts() and load that"
                )
            if state_dict["rank"] != self.rank:
                raise ValueError(f"the checkpoint is of rank {state_dict['rank']}, this is rank {self.rank}")
        if self._units is not None:
            load_units(self._units, self._registered, state_dict)
            self._step_number = state_dict["step"]
        else:
            self._checkpoint = state_dict

    def close(self) -> None:
        """End the lane and give the process group back. The state cannot be used afterwards."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        for handle in self._usage_hooks:
            handle.remove()
        self._usage_hooks.clear()
        if self._channel is not None:
            self._channel.close()
        self._failure = self._failure or "the state was closed"


def _all_finite(tensors: list[Tensor]) -> bool | Tensor:
    """Whether every element of every tensor is finite; on a device without looking at it on the host."""
    verdict = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    return bool(verdict) if verdict.device.type == "cpu" else verdict


def _octets(tensor: Tensor) -> bytes:
    """A tensor's bytes, in the order of its elements."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
