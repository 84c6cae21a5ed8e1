"""Gradient compression as mathematics: no processes, no network.

Read in this order: requests, layout, compressor, driver, then any algorithm next to its paper. To add a
compressor, write one file and add its import below; specs, command lines, the property suite, the comparison
and the table in the documentation take it from the registry.
"""

from compress.compressor import Compressor, Context, Exchange, State, per_matrix, server_chunk
from compress.cost import Price, price
from compress.exact import Exact
from compress.half import BF16, FP16
from compress.layout import TensorSpec, UnitLayout
from compress.majority import SignSGD
from compress.onebit import OneBit
from compress.options import option, parse, register, registry
from compress.powersgd import PowerSGD
from compress.protocols import Codec, served_chunk, two_sided, two_sided_rounds
from compress.quantize import Int4, Int8
from compress.randomk import RandomK
from compress.requests import AllGather, AllReduce, AllToAll, Request
from compress.sign import Sign
from compress.simulate import LockstepError, Simulation, simulate
from compress.topk import TopK
from compress.wrappers.split import Split
from compress.wrappers.warmup import Warmup

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP16",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Codec",
    "Compressor",
    "Context",
    "Exact",
    "Exchange",
    "Int4",
    "Int8",
    "LockstepError",
    "OneBit",
    "PowerSGD",
    "Price",
    "RandomK",
    "Request",
    "Sign",
    "SignSGD",
    "Simulation",
    "Split",
    "State",
    "TensorSpec",
    "TopK",
    "UnitLayout",
    "Warmup",
    "option",
    "parse",
    "per_matrix",
    "price",
    "register",
    "registry",
    "served_chunk",
    "server_chunk",
    "simulate",
    "two_sided",
    "two_sided_rounds",
]
