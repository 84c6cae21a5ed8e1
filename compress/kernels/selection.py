"""Which entries are largest: exactly, or one of each chunk."""

import numpy as np
import torch
from torch import Tensor

ROWS = 1 << 16
"""Elements handled at a time on CPU, so that the magnitudes stay in a core's own cache."""


def largest(x: Tensor, count: int) -> Tensor:
    """Indices, int64 [count], of the entries of x, [d], of largest magnitude; NaN counts as largest.

    On CPU a partition (linear time) takes the place of `torch.topk`, several times slower there.
    """
    if count >= x.numel():
        return torch.arange(x.numel(), device=x.device)
    if x.device.type != "cpu":
        return x.abs().topk(count, sorted=False).indices
    order = np.argpartition(x.abs().numpy(), x.numel() - count)
    return torch.from_numpy(np.sort(order[x.numel() - count :]))


def largest_of_each_chunk(x: Tensor, chunk: int) -> Tensor:
    """For each `chunk` consecutive entries of x, [d], the offset of the one of largest magnitude, int64 [chunks].

    The last chunk may be shorter.
    """
    whole = x.numel() // chunk
    rows, tail = x[: whole * chunk].view(whole, chunk), x[whole * chunk :]
    if x.device.type != "cpu":
        offsets = rows.abs().argmax(1)
    else:
        offsets, step = torch.empty(whole, dtype=torch.int64), max(ROWS // chunk, 1)
        for start in range(0, whole, step):
            part = slice(start, min(start + step, whole))
            np.argmax(np.abs(rows[part].numpy()), axis=1, out=offsets[part].numpy())
    return torch.cat((offsets, tail.abs().argmax(0, keepdim=True))) if tail.numel() else offsets
