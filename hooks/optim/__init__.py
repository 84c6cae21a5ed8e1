"""Optimisers that communicate in one bit: each attaches its own communication hook to the DDP model."""

from hooks.optim.onebit_adam import OneBitAdam
from hooks.optim.onebit_lamb import OneBitLamb
from hooks.optim.zeroone_adam import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
