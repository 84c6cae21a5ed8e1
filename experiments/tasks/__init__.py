"""What is trained: data, model, loss and metric, one file a task."""

from experiments.tasks.base import Batch, Task
from experiments.tasks.charlm import CharacterModel
from experiments.tasks.cifar10 import Cifar10
from experiments.tasks.mnist import Mnist

TASKS: dict[str, type[Task]] = {"mnist": Mnist, "charlm": CharacterModel, "cifar10": Cifar10}

__all__ = ["TASKS", "Batch", "Task"]
