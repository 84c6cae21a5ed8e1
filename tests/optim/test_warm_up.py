"""Before the freeze the optimisers are torch's (or LAMB), on exactly averaged gradients."""

from typing import Any

import pytest
import torch

from tests.optim.training import Net, batch, generator, make, parameters, rank, run, wrapped
from tests.pool import Pool

GROUPS = [
    {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.0},
    {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.1},
]


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    every = list(model.parameters())
    return [{"params": every[:2], **GROUPS[0]}, {"params": every[2:], **GROUPS[1]}]


def pair(decoupled: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Any]:
    """The same model twice: with ours, and with torch's optimiser on plain DDP."""
    mine, theirs = wrapped(Net(dtype=dtype)), wrapped(Net(dtype=dtype))
    ours = make("adam", mine, params=groups(mine), freeze_step=100, decoupled_weight_decay=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(theirs))
    return mine, ours, theirs, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [False, True])
def test_bitwise_torchs_adam_with_groups_and_scheduler(decoupled: bool, dtype: torch.dtype) -> None:
    mine, ours, theirs, reference = pair(decoupled, dtype)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (ours, reference)]
    for number in range(6):
        run(mine, ours, [number], dtype)
        run(theirs, reference, [number], dtype)
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(parameters(mine), parameters(theirs))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.state[a][name], reference.state[b][name])


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    mine, ours, theirs, reference = pair(False)
    for number in range(3):
        losses = []
        for model, optimizer in ((mine, ours), (theirs, reference)):

            def closure(model: Any = model, optimizer: Any = optimizer, number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch(number)).mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == losses[1]
    assert torch.equal(parameters(mine), parameters(theirs))


def test_complex_parameters() -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = torch.nn.Parameter(torch.randn(7, dtype=torch.complex64, generator=generator(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.z * (1 + 2j)).abs() * x).sum()

    models = [wrapped(Complex()) for _ in range(2)]
    optimizers = [
        make("adam", models[0], freeze_step=100, weight_decay=0.1),
        torch.optim.Adam(models[1].parameters(), lr=1e-2, weight_decay=0.1),
    ]
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(7, generator=generator(number))).backward()
            optimizer.step()
    assert torch.equal(parameters(models[0]), parameters(models[1]))


def against_plain_ddp(decoupled: bool) -> tuple[bool, float]:
    """On a worker: whether bits agree, and the largest difference relative to the distance travelled."""
    mine, ours, theirs, reference = pair(decoupled)
    start = parameters(mine)
    run(mine, ours, range(5))
    run(theirs, reference, range(5))
    a, b = parameters(mine), parameters(theirs)
    return torch.equal(a, b), float((a - b).abs().max() / (b - start).abs().max())


@pytest.mark.parametrize("decoupled", [False, True])
def test_two_ranks_bitwise_as_plain_ddp(two: Pool, decoupled: bool) -> None:
    assert all(equal for equal, _ in two.run(__name__, "against_plain_ddp", decoupled=decoupled))


def test_three_ranks_as_plain_ddp_to_rounding(three: Pool) -> None:
    """Both divide by three, one before and one after the sum: a few units of 2^-24, of a sum that may cancel."""
    assert max(gap for _, gap in three.run(__name__, "against_plain_ddp", decoupled=False)) < 1e-5


def gradients_are_the_mean() -> bool:
    """On a worker: .grad after a warm-up backward is the mean; in the compressed stage it is this rank's own."""
    model, alone = wrapped(Net()), Net()
    optimizer = make("adam", model, freeze_step=1)

    def own(number: int, whose: int) -> torch.Tensor:
        alone.load_state_dict(model.module.state_dict())
        alone.zero_grad()
        alone(batch(number, whose)).mean().backward()
        return torch.cat([p.grad.reshape(-1) for p in alone.parameters()])

    verdicts = []
    for number in range(2):
        expected = (own(number, 0) + own(number, 1)) / 2 if number == 0 else own(number, rank())
        optimizer.zero_grad()
        model(batch(number, rank())).mean().backward()
        got = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        verdicts.append(torch.equal(got, expected))
        optimizer.step()
    return all(verdicts)


def test_grad_is_the_mean_and_later_local(two: Pool) -> None:
    assert two.run(__name__, "gradients_are_the_mean") == [True, True]
