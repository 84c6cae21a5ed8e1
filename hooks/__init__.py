"""Compressed gradient exchange for torch.distributed training.

state = hooks.register(ddp_model, "powersgd:rank=4")
# or, in torch's own idiom
ddp_model.register_comm_hook(PowerSGDState(rank=4), powersgd_hook)
"""

from compress import BF16, FP16, Exact, Int4, Int8, OneBit, PowerSGD, RandomK, Sign, SignSGD, TopK
from hooks.checkpoint import merge_state_dicts
from hooks.ddp import compress_hook, ddp_hook, named_pair, register
from hooks.errors import AgreementError, ExchangeError, ReplicaError
from hooks.manual import reduce_gradients
from hooks.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from hooks.state import GradientBucket, HookState

ExactState, none_hook = named_pair(Exact)
FP16State, fp16_hook = named_pair(FP16)
BF16State, bf16_hook = named_pair(BF16)
PowerSGDState, powersgd_hook = named_pair(PowerSGD)
SignState, sign_hook = named_pair(Sign)
OneBitState, onebit_hook = named_pair(OneBit)
SignSGDState, signsgd_hook = named_pair(SignSGD)
TopKState, topk_hook = named_pair(TopK)
Int8State, int8_hook = named_pair(Int8)
Int4State, int4_hook = named_pair(Int4)
RandomKState, randomk_hook = named_pair(RandomK)

__all__ = [
    "AgreementError",
    "BF16State",
    "ExactState",
    "ExchangeError",
    "FP16State",
    "GradientBucket",
    "HookState",
    "Int4State",
    "Int8State",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitState",
    "PowerSGDState",
    "RandomKState",
    "ReplicaError",
    "SignSGDState",
    "SignState",
    "TopKState",
    "ZeroOneAdam",
    "bf16_hook",
    "compress_hook",
    "ddp_hook",
    "fp16_hook",
    "int4_hook",
    "int8_hook",
    "merge_state_dicts",
    "named_pair",
    "none_hook",
    "onebit_hook",
    "powersgd_hook",
    "randomk_hook",
    "reduce_gradients",
    "register",
    "sign_hook",
    "signsgd_hook",
    "topk_hook",
]
