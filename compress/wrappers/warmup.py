"""Exact averaging for the first steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State
from compress.exact import Exact
from compress.layout import PlaceKey, TensorSpec, UnitLayout
from compress.options import option, register
from compress.powersgd import PowerSGD


@register("warmup")
@dataclass(frozen=True)
class Warmup(Compressor):
    """Average exactly for the first steps, while gradients change fast, then compress.

    Args:
        steps: steps sent uncompressed; 0 compresses from the start. Torch's PowerSGD hook uses 1000.
        inner: the compressor that takes over.

    On the wire: one dense all-reduce a step, then as the inner compressor. Law: conserves, if the inner does.
    Not for: short runs on slow links, where the warm-up is most of the traffic.

    >>> from compress import simulate
    >>> simulate("warmup:steps=1/topk:density=0.5", [[[1.0, 2.0]], [[1.0, 2.0]]]).means.tolist()
    [[1.0, 2.0], [0.0, 2.0]]
    """

    is_wrapper = True

    inner: Compressor = field(default_factory=PowerSGD)
    steps: int = option(1000, low=0, shown=True)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(example, steps=2) for example in PowerSGD.examples()]

    @property
    def law(self) -> str:
        return self.inner.law

    @property
    def rounding(self) -> float:
        return self.inner.rounding

    @property
    def largest(self) -> float:
        return self.inner.largest

    @property
    def keeps_memory(self) -> bool:
        return self.inner.keeps_memory

    @property
    def prepares(self) -> bool:
        return self.inner.prepares

    @property
    def needs_names(self) -> bool:
        return self.inner.needs_names

    def place(self, spec: TensorSpec) -> PlaceKey:
        return self.inner.place(spec)

    def init(self, ctx: Context) -> State:
        return self.inner.init(ctx)

    def prepare(self, grad: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        return self.inner.prepare(grad, state, ctx)

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        if ctx.step >= self.steps:
            return (yield from self.inner.exchange(x, state, ctx))
        mean, _ = yield from Exact().exchange(x.clone(), State(), ctx)
        x.zero_()
        return mean, state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return (Exact() if ctx.step < self.steps else self.inner).rounds(ctx)

    def contraction(self, layout: UnitLayout) -> float | None:
        return self.inner.contraction(layout)
