"""How hypothesis searches: a quick fixed search by default, `--hypothesis-profile=thorough` for a long random one."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]  # a loaded machine is not a fault of the code

settings.register_profile(
    "quick", max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW
)
settings.register_profile("thorough", max_examples=200, database=None, deadline=None, suppress_health_check=SLOW)
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="module")
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """The mathematics is tested on small tensors, on which threads wait for one another longer than they work."""
    threads = torch.get_num_threads()
    if request.path.parent.name in ("compress", "properties", "published"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
