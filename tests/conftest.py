"""How hypothesis searches (quick and fixed by default, `--hypothesis-profile=thorough` for a long random search), and
the process groups that tests share: of this process alone, and pools of two and three workers."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.pool import Pool

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


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the only rank, on one thread: the models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool
