"""The interface of a task."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Task(ABC):
    """Data in memory, a model, and how well it does.

    Args:
        data: a folder with the data, where the task needs one.
    """

    title: ClassVar[str]
    batch: ClassVar[int]
    """Examples of one worker and step."""
    steps: ClassVar[tuple[int, int]]
    """Steps of a full and of a quick comparison."""
    adaptive: ClassVar[bool] = False
    """Whether it is trained by Adam (else by SGD)."""
    momentum: ClassVar[float] = 0.0
    """Of SGD. Zero unless needed: what error feedback delays, momentum repeats for ten steps."""
    lr: ClassVar[float]

    @abstractmethod
    def __init__(self, data: str | None = None) -> None: ...

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """A new model; seed torch first."""

    @abstractmethod
    def train_batch(self, step: int, worker: int, workers: int, seed: int) -> Batch:
        """Inputs and targets of one worker in one step; the workers' batches are disjoint."""

    @abstractmethod
    def test_batches(self, worker: int, workers: int) -> list[Batch]:
        """This worker's part of the test set."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, nats."""
        return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def evaluate(self, model: torch.nn.Module, worker: int, workers: int) -> Tensor:
        """[correct, loss summed, count] over this worker's part of the test set."""
        totals = torch.zeros(3, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for inputs, targets in self.test_batches(worker, workers):
                outputs = model(inputs)
                correct = (outputs.argmax(-1) == targets).sum()
                totals += torch.tensor([correct, self.loss(outputs, targets) * targets.numel(), targets.numel()])
        model.train()
        return totals


def epoch_order(count: int, epoch: int, seed: int) -> Tensor:
    """A permutation of `count` examples, the same on all workers."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1000003 * seed + epoch))


def indices(step: int, worker: int, workers: int, batch: int, count: int, seed: int) -> Tensor:
    """Which examples a worker trains on in one step: its part of the step's share of a shuffled epoch."""
    steps_per_epoch = count // (batch * workers)
    start = (step % steps_per_epoch) * batch * workers + worker * batch
    return epoch_order(count, step // steps_per_epoch, seed)[start : start + batch]
