"""One sign bit per element and one scale per block: encode with the residual left in place, decode by table.

Bit i of byte j is 1 where element 8j + i has its sign bit set; an element decodes to -scale or +scale.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

SEGMENT = 1 << 16
"""Elements handled at a time on CPU: small enough to stay in a core's own cache through all passes."""


@cache
def _signs_of_byte(dtype: torch.dtype) -> np.ndarray:
    """[256, 8]: the eight signs, as -1 and +1, that each byte stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2.0 * bits).astype(torch.empty(0, dtype=dtype).numpy().dtype)


def _segments(numel: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, row length) of runs of whole blocks, then of the shorter last block."""
    step, whole = max(SEGMENT // block, 1) * block, numel // block * block
    for start in range(0, whole, step):
        yield start, min(start + step, whole), block
    if whole < numel:
        yield whole, numel, numel - whole


def pack(negative: Tensor) -> Tensor:
    """bool [..., n] -> uint8 [..., ceil(n / 8)], little-endian, zero beyond the end."""
    if negative.device.type == "cpu":
        return torch.from_numpy(np.packbits(negative.numpy(), axis=-1, bitorder="little"))
    missing = -negative.shape[-1] % 8
    octets = torch.nn.functional.pad(negative.to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=negative.device)
    return (octets * powers).sum(-1, dtype=torch.uint8)


def unpack(bits: Tensor, count: int) -> Tensor:
    """uint8 [..., ceil(count / 8)] -> bool [..., count], the inverse of `pack`."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=count, bitorder="little")).view(torch.bool)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).flatten(-2)[..., :count].bool()


def encode_(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Signs and mean magnitudes of the blocks of x, [d]; x becomes x - decoded.

    Returns:
        Bits, uint8 [blocks, block / 8], zero beyond the end of x, and scales, [blocks] in the dtype of x.
    """
    blocks = -(-x.numel() // block)
    if x.device.type != "cpu":
        return encode_reference_(x, block)
    bits = torch.zeros(blocks, block // 8, dtype=torch.uint8)
    scales = torch.empty(blocks, dtype=x.dtype)
    packed, scratch = bits.view(-1).numpy(), torch.empty(min(SEGMENT, x.numel()), dtype=x.dtype)
    for start, stop, row in _segments(x.numel(), block):
        part = x[start:stop]
        magnitude = torch.abs(part, out=scratch[: stop - start])
        rows = slice(start // block, -(-stop // block))
        scale = torch.mean(magnitude.view(-1, row), 1, out=scales[rows])
        octets = np.packbits(np.signbit(part.numpy()), bitorder="little")
        packed[start // 8 : start // 8 + len(octets)] = octets
        part.view(-1, row).sub_(torch.copysign(scale[:, None], part.view(-1, row), out=magnitude.view(-1, row)))
    return bits, scales


def decode_add_(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    """out += weight * (signs * scales of their blocks), out [d]."""
    if out.device.type != "cpu":
        decode_add_reference_(out, bits, scales, weight)
        return
    block = bits.shape[1] * 8
    octets, table = bits.reshape(-1).numpy(), _signs_of_byte(out.dtype)
    scales = scales * weight
    scratch = np.empty((SEGMENT // 8, 8), dtype=table.dtype)
    for start, stop, row in _segments(out.numel(), block):
        chosen = octets[start // 8 : -(-stop // 8)]
        signs = scratch[: len(chosen)]
        np.take(table, chosen, axis=0, out=signs, mode="clip")
        part = torch.from_numpy(signs.reshape(-1)[: stop - start]).view(-1, row)
        out[start:stop].view(-1, row).addcmul_(part, scales[start // block : -(-stop // block), None])


def encode_reference_(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`encode_` in plain torch, for any device."""
    blocks = -(-x.numel() // block)
    padded = torch.zeros(blocks * block, dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    rows = padded.view(blocks, block)
    counts = torch.full((blocks,), block, dtype=x.dtype, device=x.device)
    counts[blocks - 1 :] = x.numel() - (blocks - 1) * block
    scales = rows.abs().sum(1) / counts
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=x.device)
    bits = (rows.signbit().view(blocks, block // 8, 8) * powers).sum(-1, dtype=torch.uint8)
    x.sub_(torch.copysign(scales[:, None], rows).view(-1)[: x.numel()])
    return bits, scales


def decode_add_reference_(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    """`decode_add_` in plain torch, for any device."""
    shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
    negative = (bits[..., None] >> shifts) & 1
    signs = 1 - 2 * negative.to(out.dtype).flatten(1)
    out += (signs * (scales * weight)[:, None]).view(-1)[: out.numel()]
