"""Characters of English: a small transformer on Python's own help texts."""

import math

import torch
from torch import Tensor, nn

from experiments.tasks.base import Batch, Task


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder over characters."""

    def __init__(self, symbols: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5 / math.sqrt(width))

    def forward(self, characters: Tensor) -> Tensor:
        where = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.norm(self.blocks(self.embed(characters) + self.position(where))))


class CharacterModel(Task):
    """Next character of the 0.46 MB of help texts that come with Python (pydoc_data.topics); the last tenth is the
    test set. Accuracy is the share of characters predicted right, loss is in nats a character."""

    title = "character model on Python's help texts, 2-layer transformer"
    batch = 8
    length = 64
    steps = (300, 60)
    lr = 2e-3
    adaptive = True

    def __init__(self, data: str | None = None) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        symbols = sorted(set(text))
        self._symbols = len(symbols)
        codes = {symbol: code for code, symbol in enumerate(symbols)}
        encoded = torch.tensor([codes[symbol] for symbol in text])
        cut = len(encoded) * 9 // 10
        self._train, test = encoded[:cut], encoded[cut:]
        count = min((len(test) - 1) // self.length, 256)
        self._test = (
            test[: count * self.length].view(count, -1),
            test[1 : count * self.length + 1].view(count, -1),
        )

    def model(self) -> nn.Module:
        return Transformer(self._symbols, width=160, depth=2, heads=4, length=self.length)

    def train_batch(self, step: int, worker: int, workers: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed((1000003 * seed + step) * workers + worker)
        starts = torch.randint(len(self._train) - self.length - 1, (self.batch, 1), generator=generator)
        window = self._train[starts + torch.arange(self.length + 1)]
        return window[:, :-1], window[:, 1:]

    def test_batches(self, worker: int, workers: int) -> list[Batch]:
        inputs, targets = self._test
        return list(zip(inputs[worker::workers].split(32), targets[worker::workers].split(32), strict=True))
