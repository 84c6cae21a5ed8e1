"""CIFAR-10 for those who have it: torchvision's download, and a ResNet of three stages."""

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experiments.tasks.base import Batch, Task, indices

FOLDER = "cifar-10-batches-py"


class Residual(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, after), nn.GroupNorm(8, after)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class Cifar10(Task):
    """50,000 training and 10,000 test images, cut and mirrored at random; group norm, so that no buffers travel."""

    title = "CIFAR-10, residual network"
    batch = 64
    steps = (4000, 200)
    lr = 0.05
    momentum = 0.9

    def __init__(self, data: str | None = None) -> None:
        folder = Path(data or "") / FOLDER
        if data is None or not folder.is_dir():
            raise ValueError(
                f"--task cifar10 needs --data DIR with torchvision's {FOLDER}/ in it (got {data!r}); "
                "torchvision.datasets.CIFAR10(DIR, download=True) puts it there"
            )
        self._train = self._read([folder / f"data_batch_{number}" for number in range(1, 6)])
        self._test = self._read([folder / "test_batch"])

    @staticmethod
    def _read(files: list[Path]) -> Batch:
        parts = [pickle.loads(file.read_bytes(), encoding="latin1") for file in files]
        pixels = torch.from_numpy(np.concatenate([part["data"] for part in parts])).view(-1, 3, 32, 32)
        labels = torch.tensor([label for part in parts for label in part["labels"]])
        mean, spread = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])
        return (pixels.float() - mean[:, None, None]) / spread[:, None, None], labels

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(),
            Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 256, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def train_batch(self, step: int, worker: int, workers: int, seed: int) -> Batch:
        images, labels = self._train
        chosen = indices(step, worker, workers, self.batch, len(labels), seed)
        generator = torch.Generator().manual_seed((1000003 * seed + step) * workers + worker)
        padded = nn.functional.pad(images[chosen], (4, 4, 4, 4))
        top, left = torch.randint(9, (2,), generator=generator).tolist()
        cut = padded[:, :, top : top + 32, left : left + 32]
        mirrored = torch.rand(len(cut), 1, 1, 1, generator=generator) < 0.5
        return torch.where(mirrored, cut.flip(3), cut), labels[chosen]

    def test_batches(self, worker: int, workers: int) -> list[Batch]:
        images, labels = self._test
        return list(zip(images[worker::workers].split(250), labels[worker::workers].split(250), strict=True))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)
