"""Different compressors for different parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, nested
from compress.exact import Exact
from compress.layout import PlaceKey, TensorSpec, UnitLayout
from compress.options import option, parse, register
from compress.protocols import parallel
from compress.requests import Request
from compress.sign import Sign

INNER, CHILD = 0, 1


@dataclass(frozen=True)
class SplitState(State):
    inner: State = nested(part=INNER)
    child: State = nested(part=CHILD)


@register("split")
@dataclass(frozen=True)
class Split(Compressor):
    """Send the matching parameters by another compressor; nest several for several rules.

    Args:
        match: which parameters: "vectors" (fewer than two axes: biases and the weights of normalisation
            layers) or a pattern of names with * and ?, such as "*embed*". Patterns need parameter names, so
            the state must know its model.
        child: compressor of the matching parameters; in a spec in parentheses: child=(topk:density=0.01).
        inner: compressor of all others.

    On the wire: what both ask for in the same round, of the same kind, travels as one message.
    Law: conserves, if both do. Contraction: the smaller of the two.
    Not for: PowerSGD's vectors, which it averages exactly by itself.

    >>> from compress import simulate
    >>> simulate("split/topk:density=0.25", [[[1.0, 2.0, 3.0, 4.0, 5.0]]], shapes=[(2, 2), (1,)]).means[0].tolist()
    [0.0, 0.0, 0.0, 4.0, 5.0]
    """

    is_wrapper = True

    inner: Compressor = field(default_factory=Sign)
    match: str = option("vectors")
    child: Compressor = field(default_factory=Exact)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.match or any(letter in ",:/()=" or letter.isspace() for letter in self.match):
            raise ValueError(
                f"split: option 'match' must be 'vectors' or a pattern of parameter names, got {self.match!r}"
            )

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [
            cls(),
            parse("split:match=*1*,child=(topk:density=0.1)/powersgd:rank=1,min_compression_rate=0"),
            parse("split:child=(bf16)/split:match=*0*,child=(sign)/randomk:density=0.5"),
        ]

    def _matches(self, spec: TensorSpec) -> bool:
        if self.match == "vectors":
            return len(spec.shape) - spec.is_complex < 2
        return fnmatchcase(spec.name, self.match)

    @property
    def _children(self) -> tuple[Compressor, Compressor]:
        return self.inner, self.child

    @property
    def needs_names(self) -> bool:
        return self.match != "vectors" or any(child.needs_names for child in self._children)

    @property
    def law(self) -> str:
        return "conserves" if all(child.law == "conserves" for child in self._children) else "none"

    @property
    def rounding(self) -> float:
        return max(child.rounding for child in self._children)

    @property
    def largest(self) -> float:
        return min(child.largest for child in self._children)

    @property
    def keeps_memory(self) -> bool:
        return any(child.keeps_memory for child in self._children)

    @property
    def prepares(self) -> bool:
        return any(child.prepares for child in self._children)

    def place(self, spec: TensorSpec) -> PlaceKey:
        part = CHILD if self._matches(spec) else INNER
        return (part, *self._children[part].place(spec))

    def _parts(self, ctx: Context) -> list[tuple[int, Compressor, slice, Context]]:
        """The children that have parameters here: index, compressor, range in the arena, context."""
        parts = []
        for index, child in enumerate(self._children):
            span, layout = ctx.layout.part(index)
            if layout.numel:
                arena = None if ctx.arena is None else ctx.arena[span]
                inner_ctx = replace(ctx, layout=layout, salt=f"{ctx.salt}{index}.", arena=arena)
                parts.append((index, child, span, inner_ctx))
        return parts

    def init(self, ctx: Context) -> State:
        states: list[State] = [State(), State()]
        for index, child, _, inner_ctx in self._parts(ctx):
            states[index] = child.init(inner_ctx)
        return SplitState(*states)

    def prepare(self, grad: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        assert isinstance(state, SplitState)
        states = [state.inner, state.child]
        for index, child, span, inner_ctx in self._parts(ctx):
            prepared, states[index] = child.prepare(grad[span], states[index], inner_ctx)
            if prepared.data_ptr() != grad[span].data_ptr():
                grad[span] = prepared
        return grad, SplitState(*states)

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        assert isinstance(state, SplitState)
        states, parts = [state.inner, state.child], self._parts(ctx)
        results = yield from parallel(
            [child.exchange(x[span], states[index], inner_ctx) for index, child, span, inner_ctx in parts]
        )
        mean = ctx.result(x)
        for (index, child, span, _), (part_mean, new_state) in zip(parts, results, strict=True):
            states[index] = new_state
            if part_mean.data_ptr() != mean[span].data_ptr():
                mean[span] = part_mean
            if not child.keeps_memory:
                x[span] = 0
        return mean, SplitState(*states)

    def rounds(self, ctx: Context) -> Sequence[Round]:
        merged: dict[tuple[int, type[Request]], int] = {}
        for _, child, _, inner_ctx in self._parts(ctx):
            for number, (kind, payload) in enumerate(child.rounds(inner_ctx)):
                merged[number, kind] = merged.get((number, kind), 0) + payload
        return [(kind, payload) for (_, kind), payload in sorted(merged.items(), key=lambda item: item[0][0])]

    def contraction(self, layout: UnitLayout) -> float | None:
        bounds = [
            child.contraction(part)
            for child, part in ((child, layout.part(index)[1]) for index, child in enumerate(self._children))
            if part.numel
        ]
        return None if None in bounds else min((bound for bound in bounds if bound is not None), default=1.0)
