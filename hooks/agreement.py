"""Do all ranks do the same thing? The first-step check of options and models, and the check of replicas."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from compress.driver import Perform
from compress.requests import AllGather
from hooks.errors import AgreementError, ReplicaError
from hooks.transport import Transport


def check_agreement(description: Mapping[str, Any], perform: Perform, transport: Transport) -> None:
    """Compare what each rank is about to do; collective.

    Args:
        description: topic -> plain value (compressor, seed, versions, parameters …).

    Raises:
        AgreementError: with the same message on all ranks: topic, and each rank's value.
    """
    everyones = _gather_texts(json.dumps(description, sort_keys=True), perform, transport.device)
    if len(set(everyones)) == 1:
        return
    descriptions = [json.loads(text) for text in everyones]
    differences = []
    for topic in sorted({topic for each in descriptions for topic in each}):
        values = [each.get(topic) for each in descriptions]
        if any(value != values[0] for value in values):
            differences.append(f"{topic}: {_contrast(values)}")
    raise AgreementError(
        "the ranks differ, so their gradients cannot be exchanged; give every rank the same. " + "; ".join(differences)
    )


def check_replicas(digests: Mapping[str, str], perform: Perform, transport: Transport) -> None:
    """Compare the ranks' digests of each parameter; collective.

    Raises:
        ReplicaError: with the same message on all ranks: the ranks that differ from most, and where first.
    """
    everyones = _gather_texts(json.dumps(digests), perform, transport.device)
    usual, _ = Counter(everyones).most_common(1)[0]
    drifted = [rank for rank, text in enumerate(everyones) if text != usual]
    if drifted:
        theirs, most = json.loads(everyones[drifted[0]]), json.loads(usual)
        first = next(name for name in most if theirs.get(name) != most[name])
        raise ReplicaError(f"the replicas of ranks {drifted} differ from the others', first in parameter {first!r}")


def _contrast(values: list[Any]) -> str:
    """Each rank's value; of long lists only the first entry that differs."""
    if all(isinstance(value, list) for value in values):
        longest = max(map(len, values))
        for position in range(longest):
            entries = [value[position] if position < len(value) else "nothing" for value in values]
            if any(entry != entries[0] for entry in entries):
                values = [f"{entry} (entry {position} of {longest})" for entry in entries]
                break
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))


def _gather_texts(text: str, perform: Perform, device: torch.device) -> list[str]:
    """The texts of all ranks, in order."""
    octets = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    (lengths,) = perform(AllGather((torch.tensor([len(octets)], device=device),)))
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(octets)] = octets
    (texts,) = perform(AllGather((padded,)))
    return [bytes(row[:length].tolist()).decode() for row, length in zip(texts, lengths, strict=True)]
