"""Symmetric block-scaled integers: encode with the residual left in place, decode."""

import math

import torch
from torch import Tensor

SEGMENT = 1 << 16
"""Elements handled at a time on CPU, so that all passes but the first find them in a core's own cache."""


def encode_(x: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    """Nearest levels, int8 [blocks, block], and scales [blocks] of x, [d]; x becomes x - decoded.

    A block's scale is its largest magnitude over `levels`, so nothing is clipped; blocks of zeros have scale 0.
    """
    blocks = -(-x.numel() // block)
    padded = torch.zeros(blocks * block, dtype=torch.int8, device=x.device)
    codes, scales = padded.view(blocks, block), torch.empty(blocks, dtype=x.dtype, device=x.device)
    step = max(SEGMENT // block, 1) * block if x.device.type == "cpu" else max(x.numel(), 1)
    for start in range(0, x.numel(), step):
        part = x[start : start + step]
        whole = part.numel() // block * block
        first = start // block
        for row, width in ((part[:whole].view(-1, block), block), (part[whole:].view(1, -1), part.numel() - whole)):
            if row.numel():
                span = slice(first, first + len(row))
                scale = torch.div(row.abs().amax(1), levels, out=scales[span])
                inverse = torch.where(scale > 0, 1 / scale, 0).clamp(max=torch.finfo(x.dtype).max)
                nearest = (row * inverse[:, None]).round_().clamp_(-levels, levels)
                codes[span, :width] = nearest.to(torch.int8)
                row.addcmul_(nearest, scale[:, None], value=-1)
                first += len(row)
    return codes, scales


def decode_add_(out: Tensor, codes: Tensor, scales: Tensor, weight: float) -> None:
    """out += weight * codes * scales of their blocks, out [d]."""
    block, scales = codes.shape[1], scales * weight
    step = max(SEGMENT // block, 1) * block if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        part, rows = out[start : start + step], slice(start // block, math.ceil((start + step) / block))
        part += (codes[rows] * scales[rows, None]).view(-1)[: part.numel()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 [blocks, block] of values in -8…7 -> uint8 [blocks, block / 2]: first half low, second half high."""
    low, high = codes.chunk(2, dim=1)
    return (low & 15).view(torch.uint8) | ((high & 15).view(torch.uint8) << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    nibbles = torch.cat((packed & 15, packed >> 4), dim=1).view(torch.int8)
    return ((nibbles ^ 8) - 8).to(torch.int8)
