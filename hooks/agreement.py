"""The first-step check that all ranks are about to do the same thing."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from compress.driver import Perform
from compress.requests import AllGather
from hooks.errors import AgreementError


def check_agreement(description: Mapping[str, Any], perform: Perform, device: torch.device) -> None:
    """Compare what each rank is about to do; collective.

    Args:
        description: topic -> plain value (compressor, seed, versions, parameters …).
        device: where the messages live while they are sent.

    Raises:
        AgreementError: with the same message on all ranks: topic, and each rank's value.
    """
    everyones = _gather_texts(json.dumps(description, sort_keys=True), perform, device)
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
