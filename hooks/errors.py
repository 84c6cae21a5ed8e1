"""What can go wrong between processes, as exceptions."""


class ExchangeError(RuntimeError):
    """A gradient exchange failed on this rank or on a peer; the state is unusable afterwards.

    The original exception is the cause and stays available as `state.error`.
    """


class ReplicaError(RuntimeError):
    """The ranks' parameters are no longer equal. Raised with the same message on all ranks."""


class AgreementError(ValueError):
    """The ranks disagree about the compressor, its options, the seed, the model or library versions.

    Raised with the same message on all ranks, before any gradient is exchanged.
    """
