"""The first-step check that all ranks are about to do the same thing."""

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hooks.errors import AgreementError


def check_agreement(description: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Compare what each rank is about to do; collective on the group.

    Args:
        description: topic -> plain value (compressor, seed, versions, parameters …).

    Raises:
        AgreementError: with the same message on all ranks: topic, and each rank's value.
    """
    if group is None:
        return
    mine = json.dumps(description, sort_keys=True)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
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
