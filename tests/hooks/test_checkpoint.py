"""Stopping and going on: the same bits on the same ranks, nothing lost on others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hooks
from compress import registry
from tests.pool import Pool

PROGRAMS = "tests.hooks.programs"
SPECS = [str(example) for cls in registry.values() for example in cls.examples()]


@pytest.mark.parametrize("spec", SPECS)
def test_resuming_gives_the_bits_of_never_stopping(two: Pool, spec: str) -> None:
    assert all(two.run(PROGRAMS, "resumed", spec=spec, stop=3))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resuming_at_the_end_of_a_warm_up(two: Pool, stop: int) -> None:
    assert all(two.run(PROGRAMS, "resumed", spec="warmup:steps=2/powersgd:rank=1", stop=stop))


@pytest.mark.parametrize("spec", ["sign", "powersgd:rank=1", "onebit", "topk:density=0.1", "split/int4"])
def test_what_is_owed_survives_a_change_of_world(two: Pool, three: Pool, spec: str) -> None:
    saved, owed = zip(*three.run(PROGRAMS, "saved_and_owed", spec=spec, count=4), strict=True)
    merged = hooks.merge_state_dicts(saved)
    for resumed in two.run(PROGRAMS, "owed_after_loading", spec=spec, state_dict=merged):
        for name, tensor in owed[0].items():
            torch.testing.assert_close(resumed[name], tensor, atol=1e-6, rtol=1e-5)
    assert any(tensor.abs().max() > 0.1 for tensor in owed[0].values() if tensor.numel()), "something was owed"


@pytest.mark.parametrize("spec", ["sign", "powersgd:rank=1"])
def test_one_folder_for_all_ranks(two: Pool, three: Pool, tmp_path: Path, spec: str) -> None:
    assert all(three.run(PROGRAMS, "saved_sharded", spec=spec, path=str(tmp_path)))
    assert all(two.run(PROGRAMS, "loaded_elsewhere", spec=spec, path=str(tmp_path)))


@pytest.mark.usefixtures("alone")
class TestRefusals:
    """A checkpoint of something else is not loaded."""

    def saved(self, spec: str = "sign", features: int = 4) -> tuple[hooks.HookState, dict[str, object]]:
        model = DistributedDataParallel(nn.Linear(features, 4))
        state = hooks.register(model, spec)
        model(torch.ones(1, features)).sum().backward()
        return state, state.state_dict()

    def test_another_compressor(self) -> None:
        _, saved = self.saved("sign")
        other, _ = self.saved("onebit")
        with pytest.raises(ValueError, match=r"'sign'.*'onebit'"):
            other.load_state_dict(saved)

    def test_another_model(self) -> None:
        _, saved = self.saved(features=4)
        other, _ = self.saved(features=5)
        with pytest.raises(ValueError, match="weight"):
            other.load_state_dict(saved)

    def test_another_world(self) -> None:
        state, saved = self.saved()
        with pytest.raises(ValueError, match="merge_state_dicts"):
            state.load_state_dict({**saved, "world_size": 3})

    def test_parts_of_different_checkpoints(self) -> None:
        _, saved = self.saved()
        two_ranks = [{**saved, "world_size": 2}, {**saved, "world_size": 2, "rank": 1, "step": 9}]
        with pytest.raises(ValueError, match="step"):
            hooks.merge_state_dicts(two_ranks)
        with pytest.raises(ValueError, match="ranks 0 to 1"):
            hooks.merge_state_dicts(two_ranks[:1])

    def test_a_state_that_knows_no_names_adopts_those_of_the_checkpoint(self) -> None:
        _, saved = self.saved()
        model = DistributedDataParallel(nn.Linear(4, 4))
        state = hooks.HookState("sign")
        state.load_state_dict(saved)
        model.register_comm_hook(state, hooks.compress_hook)
        model(torch.ones(1, 4)).sum().backward()
        memory: dict[str, Tensor] = state.memory()
        assert set(memory) == {"weight", "bias"}
