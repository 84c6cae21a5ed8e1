"""Most tests of the optimisers need a process group, if only of one worker."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def in_a_world_of_one(alone: None) -> None:
    """See `alone`."""
