"""A process group of one worker for most tests, and pools of two and three for what needs peers."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.optim.pool import Pool


@pytest.fixture(autouse=True, scope="module")
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
