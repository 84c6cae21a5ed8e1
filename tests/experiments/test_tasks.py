"""Real data in the right shapes, split and shared out rightly."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.tasks import TASKS, Task
from experiments.tasks.base import indices


@pytest.fixture(scope="module", params=["mnist", "charlm"])
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]()


def test_a_model_learns_from_its_batches(task: Task) -> None:
    torch.manual_seed(0)
    model = task.model()
    inputs, targets = task.train_batch(0, worker=0, workers=4, seed=0)
    assert len(inputs) == len(targets) == task.batch
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_batches_depend_on_seed_step_and_worker_and_on_nothing_else(task: Task) -> None:
    first = task.train_batch(3, worker=1, workers=4, seed=0)
    again = task.train_batch(3, worker=1, workers=4, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in ({"step": 4}, {"worker": 2}, {"seed": 1}):
        changed = task.train_batch(**{"step": 3, "worker": 1, "workers": 4, "seed": 0, **other})
        assert not torch.equal(first[0], changed[0])


def test_the_workers_evaluate_the_whole_test_set_together(task: Task) -> None:
    torch.manual_seed(0)
    model = task.model()
    correct, loss, count = task.evaluate(model, 0, 1).tolist()
    assert 0 <= correct <= count
    assert loss > 0
    shared = sum(task.evaluate(model, worker, 3) for worker in range(3))
    assert isinstance(shared, torch.Tensor)
    assert shared[2] == count
    assert shared[0] == correct
    assert shared[1] == pytest.approx(loss, rel=1e-4)
    assert model.training


def test_models_have_no_buffers_for_ddp_to_send(task: Task) -> None:
    assert not list(task.model().buffers())


def test_mnist_is_split_evenly_into_classes() -> None:
    mnist = TASKS["mnist"]()
    (test,) = mnist.test_batches(0, 1)
    assert test[1].bincount().tolist() == [100] * 10
    epoch = [mnist.train_batch(step, worker, 4, 0)[1] for step in range(31) for worker in range(4)]
    assert torch.cat(epoch).bincount().max() <= 400
    assert test[0].shape == (1000, 1, 28, 28)


def test_mnists_network_has_a_million_parameters() -> None:
    assert sum(parameter.numel() for parameter in TASKS["mnist"]().model().parameters()) == 1_002_250


def test_an_epoch_is_shared_out_without_overlap() -> None:
    parts = [indices(step, worker, 2, 5, 40, seed=0) for step in range(4) for worker in range(2)]
    assert torch.cat(parts).sort().values.tolist() == list(range(40))
    assert not torch.equal(indices(0, 0, 2, 5, 40, 0), indices(4, 0, 2, 5, 40, 0))


@pytest.mark.parametrize("data", [None, "/nonexistent"])
def test_cifar_says_what_it_needs(data: str | None) -> None:
    with pytest.raises(ValueError, match=r"--data DIR.*cifar-10-batches-py"):
        TASKS["cifar10"](data)


def test_cifar_is_read_as_torchvision_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = {
            "data": numbers.integers(0, 256, (100, 3072), dtype=np.uint8),
            "labels": numbers.integers(0, 10, 100).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content))
    task = TASKS["cifar10"](str(tmp_path))
    images, labels = task.train_batch(0, 0, 2, 0)
    assert images.shape == (task.batch, 3, 32, 32)
    assert labels.shape == (task.batch,)
    assert task.model()(images[:2]).shape == (2, 10)
