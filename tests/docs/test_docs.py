"""Every Python block of the documentation runs, and its generated table is that of the registry."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compress import registry
from experiments.catalogue import rewritten

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    known = dict(registry)
    yield
    registry.clear()
    registry.update(known)  # the page on contributing registers a compressor
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    model = torch.nn.Linear(8, 8)
    names = {"torch": torch, "model": model, "ddp_model": DistributedDataParallel(model)}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_is_that_of_the_registry() -> None:
    page = ROOT / "docs" / "compressors.md"
    assert page.read_text() == rewritten(page.read_text()), "run `make docs`"
