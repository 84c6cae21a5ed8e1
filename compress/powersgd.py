"""PowerSGD: low-rank approximation by one warm-started step of subspace iteration."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, per_matrix
from compress.layout import Group, PlaceKey, TensorSpec
from compress.options import option, register
from compress.requests import AllReduce

LOW_RANK, TAIL = 0, 1


def orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns of p, [b, n, r], by Householder QR: right also for dependent or zero
    columns, where it completes the basis with arbitrary directions."""
    return torch.linalg.qr(p).Q


def revived(q: Tensor, fresh: Tensor) -> Tensor:
    """Rows of q, [b, r, m], scaled to unit length; rows that vanished are replaced by those of `fresh`.

    Without this a layer whose gradient is zero for one step would keep a zero q for ever. Lengths are taken
    relative to the largest entry, so that gradients of 1e-25 do not underflow when squared.
    """
    top = q.abs().amax(2, keepdim=True)
    direction = q / torch.where(top > 0, top, 1)
    length = torch.linalg.vector_norm(direction, dim=2, keepdim=True)
    size = top * length
    dead = size <= 1e-12 * size.amax(1, keepdim=True)
    return torch.where(dead, fresh, direction / torch.where(length > 0, length, 1))


@dataclass(frozen=True)
class PowerSGDState(State):
    """q: the right factors of the last step, transposed, unit rows, [slots, rank, columns] a group; fresh: the
    random ones of the start, which take the place of rows that vanish."""

    q: tuple[Tensor, ...] = per_matrix()
    fresh: tuple[Tensor, ...] = per_matrix()


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low rank by block power iteration (Vogels, Karimireddy, Jaggi, 2019, arXiv:1905.13727, Algorithm 1).

    For each matrix M, n x m:  P = mean(M Q), orthonormalised;  Q' = mean(M^T P);  estimate P Q'^T;  Q for the
    next step is Q' with unit columns. The residual is M - P (M^T P)^T with the worker's own product, which is
    orthogonal to P. Tensors of more than two axes are flattened to (first axis, rest); matrices of one shape
    are handled together.

    Args:
        rank: columns r of P and Q, at least 1, capped at min(n, m). Higher: better estimate, more bytes.
        min_compression_rate: a matrix is compressed only if (n + m) r · this < n m; the other tensors,
            vectors and complex ones are averaged exactly, together with the P of the others.
        warm_start: start from the last step's Q; without it from new random numbers each step.

    On the wire: two all-reduces a unit, sum of n r and the uncompressed elements, then sum of m r, in the
    arena's precision. Bytes do not grow with W.
    Law: conserves, and is linear. No contraction bound for one step: it is r/m in expectation over Q.
    Not for: models that are mostly vectors, embeddings with few rows in use, or fleets of mixed hardware, on
    which the orthogonalisation may differ in the last bit.

    >>> from compress import simulate
    >>> ones = [[1.0, 1.0], [1.0, 1.0]]
    >>> result = simulate("powersgd:rank=1,min_compression_rate=0", [[ones, ones]], shapes=[(2, 2)])
    >>> result.means[0].round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    rank: int = option(1, low=1, shown=True)
    min_compression_rate: float = option(2.0, low=0.0)
    warm_start: bool = option(True)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(rank=2, min_compression_rate=0.0), cls(rank=2, warm_start=False)]

    def place(self, spec: TensorSpec) -> PlaceKey:
        if spec.matrix is None or spec.is_complex:
            return (TAIL,)
        n, m = spec.matrix
        worth_it = (n + m) * min(self.rank, n, m) * self.min_compression_rate < n * m
        return (LOW_RANK, n, m) if worth_it else (TAIL,)

    def init(self, ctx: Context) -> State:
        q = tuple(self._start(group, ctx) for group in ctx.layout.groups)
        return PowerSGDState(q, q)

    def _start(self, group: Group, ctx: Context, *purpose: object) -> Tensor:
        """Random Q of a group, [slots, r, m], seeded by parameter name; empty for the tail."""
        if group.key[0] == TAIL:
            return torch.empty(0, dtype=ctx.layout.dtype, device=ctx.device)
        _, n, m = group.key
        r = min(self.rank, n, m)
        q = torch.stack([ctx.shared_normal((r, m), slot.spec.name, *purpose) for slot in group.slots])
        return q / torch.linalg.vector_norm(q, dim=2, keepdim=True)

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        assert isinstance(state, PowerSGDState)
        groups = [group for group in ctx.layout.groups if group.key[0] == LOW_RANK]
        span, _ = ctx.layout.part(TAIL)
        matrices = _stacks(x, groups)
        warm = state.q if self.warm_start else tuple(self._start(group, ctx, ctx.step) for group in ctx.layout.groups)
        # Q is kept transposed: M @ Q^T' with a contiguous Q' and P^T @ M are the fast forms of skinny products.
        p = [m @ q.mT for m, q in zip(matrices, warm, strict=False)]
        *p, tail = yield AllReduce((*p, x[span].clone()))
        x[span] = 0
        p = [orthonormal(each) for each in p]
        q = [each.mT @ m for each, m in zip(p, matrices, strict=True)]
        for m, left, right in zip(matrices, p, q, strict=True):
            m.baddbmm_(left, right, alpha=-1)
        mean = ctx.result(x)
        mean[span] = tail
        if not groups:
            return mean, state
        q = list((yield AllReduce(tuple(q))))
        for out, left, right in zip(_stacks(mean, groups), p, q, strict=True):
            torch.bmm(left, right, out=out)
        renewed = tuple(revived(each, fresh) for each, fresh in zip(q, state.fresh, strict=False))
        return mean, PowerSGDState(renewed + state.q[len(groups) :], state.fresh)

    def rounds(self, ctx: Context) -> Sequence[Round]:
        left = right = 0
        for group in ctx.layout.groups:
            if group.key[0] == TAIL:
                left += group.stop - group.start
            else:
                _, n, m = group.key
                r = min(self.rank, n, m)
                left, right = left + len(group.slots) * n * r, right + len(group.slots) * m * r
        itemsize = ctx.layout.itemsize
        return [(AllReduce, left * itemsize), *([(AllReduce, right * itemsize)] if right else [])]


def _stacks(arena: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """Views [slots, n, m] of the groups of equal matrices, which lie one after the other in the arena."""
    return [arena[g.start : g.stop].view(len(g.slots), *g.key[1:]) for g in groups]
