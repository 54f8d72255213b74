from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.optimizer_state import reach, states_of
from ampdoctor.checkpoints.stored_tensor import BLOCK_ELEMENTS
from ampdoctor.checkpoints.tensor_statistics import FULLY_COUNTED, summarize

LARGE = 5 * FULLY_COUNTED + 12345
DTYPES = [torch.float32, torch.bfloat16]


def summary_of(path, **options):
    with open_checkpoint(path) as checkpoint:
        return summarize(checkpoint, **options)


def large(dtype, seed=0):
    return (torch.randn(LARGE, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_exact_is_exact_wherever_it_lies_in_a_large_tensor(tmp_path, dtype):
    """The last elements of a block are outside the sample."""
    values = large(dtype)
    values[BLOCK_ELEMENTS - 1] = math.nan
    values[2 * BLOCK_ELEMENTS - 1] = math.inf
    values[2 * BLOCK_ELEMENTS - 2] = -math.inf
    values[3 * BLOCK_ELEMENTS - 1] = 30000.0
    values[4 * BLOCK_ELEMENTS - 1] = torch.finfo(dtype).max
    save_file({"w": values}, tmp_path / "m.safetensors")
    (tensor,) = summary_of(tmp_path / "m.safetensors").tensors
    assert (tensor.nan, tensor.pos_infs, tensor.neg_infs, tensor.at_max) == (1, 1, 1, 1)
    assert tensor.amax == torch.finfo(dtype).max
    assert tensor.examined == LARGE
    assert tensor.counted < LARGE
    assert tensor.fp16.relative_error == math.inf
    assert tensor.fp16.overflowed > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_tells_the_shares_of_the_whole(tmp_path, dtype):
    values = large(dtype)
    save_file({"w": values, "small": values[:1000].clone()}, tmp_path / "m.safetensors")
    sampled, exact = (summary_of(tmp_path / "m.safetensors", exact=flag) for flag in (False, True))
    (_, few), (_, all_) = (sorted(s.tensors, key=lambda t: t.examined) for s in (sampled, exact))
    assert FULLY_COUNTED <= few.counted < all_.counted == LARGE
    assert (few.amax, few.nan, few.examined) == (all_.amax, 0, LARGE)
    ours, truth = few.fp16, all_.fp16
    assert ours.subnormal == pytest.approx(truth.subnormal, rel=0.1)
    assert ours.headroom == truth.headroom


STRUCTURES = {
    "heads": lambda w: w.view(-1, 128, 8192)[:, :8].mul_(1e-9),  # the first rows of each head of 128
    "gate and up": lambda w: w.view(-1, 2, 1 << 20)[:, 1].mul_(1e-9),
}


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_no_structure_falls_in_step_with_the_sample(tmp_path, structure):
    """A sample of each block's first elements called 6 % of flushed weights 99.7 % (period equal to the block)."""
    weights = torch.randn(2048, 8192, generator=torch.Generator().manual_seed(0)) * 0.02
    STRUCTURES[structure](weights)
    save_file({"w": weights}, tmp_path / "m.safetensors")
    sampled, exact = (summary_of(tmp_path / "m.safetensors", exact=flag) for flag in (False, True))
    (few,), (all_,) = sampled.tensors, exact.tensors
    ours, truth = few.fp16, all_.fp16
    assert few.counted == pytest.approx(few.examined / 16, rel=0.01)
    assert ours.flushed == pytest.approx(truth.flushed, abs=0.01)
    assert few.zeros / few.counted == pytest.approx(all_.zeros / all_.counted, abs=0.01)


def test_totals_of_a_role_are_those_of_all_elements(tmp_path):
    """Samples that were added up as they are gave a small tensor the weight of one sixteen times as large."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(4096, 4096, generator=generator),
        "small": torch.randn(1024, 1024, generator=generator) * 1e-9,
    }
    save_file(tensors, tmp_path / "m.safetensors")
    sampled, exact = (summary_of(tmp_path / "m.safetensors", exact=flag).roles[0] for flag in (False, True))
    assert sampled.elements == exact.elements == 17 * 1024 * 1024
    assert sampled.amax == exact.amax
    assert sampled.casts[0].flushed == pytest.approx(exact.casts[0].flushed, rel=0.01)
    assert exact.casts[0].flushed == pytest.approx(1 / 17, rel=0.01)


def test_an_average_that_shares_its_storage_does_not_hide_the_weights(tmp_path):
    weight = torch.tensor([1.0, math.nan])
    torch.save({"ema": {"a.weight": weight}, "model": {"a.weight": weight}}, tmp_path / "c.pt")
    assert {(t.role, t.nan) for t in summary_of(tmp_path / "c.pt").tensors} == {("ema", 1), ("weight", 1)}


def test_results_do_not_depend_on_the_number_of_threads(tmp_path):
    tensors = {f"w{n}": large(torch.float32, n)[: n * 70_001 + 1].clone() for n in range(12)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert summary_of(tmp_path / "m.safetensors", jobs=1) == summary_of(tmp_path / "m.safetensors", jobs=5)


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        (torch.zeros(3, 4), 0.0),
        (torch.full((BLOCK_ELEMENTS + 5,), -1.5), -1.5),
        (torch.tensor([1.0, -1.0]), None),
        (torch.tensor([2.0]), None),
        (torch.tensor([math.nan, math.nan]), None),
        (torch.cat([torch.ones(BLOCK_ELEMENTS), torch.tensor([2.0])]), None),
    ],
)
def test_a_constant_tensor_is_known_as_one(tmp_path, values, constant):
    save_file({"w": values}, tmp_path / "m.safetensors")
    assert summary_of(tmp_path / "m.safetensors").tensors[0].constant == constant


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_formats_without_reductions_are_described_too(tmp_path, dtype):
    values = torch.tensor([0.5, -2.0, math.nan, 0.0]).to(dtype)
    torch.save({"w": values}, tmp_path / "c.pt")
    (tensor,) = summary_of(tmp_path / "c.pt").tensors
    assert tensor.nan == 1
    assert tensor.amax == 2.0
    assert tensor.amin == 0.5


# -- what the next update does to stored weights, with torch's own optimizers as the judge


def optimizers(lr):
    return {
        "adam": lambda p: torch.optim.Adam(p, lr=lr),
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0, betas=(0.8, 0.95)),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
    }


def looked_at(path, steps=1):
    with open_checkpoint(path) as checkpoint:
        states = states_of(checkpoint)
        refs = {(ref.role, ref.entry): ref.stored for ref in checkpoint}
        stored = next(states[id(ref.stored)] for ref in checkpoint if ref.role == "moment")
        assert stored.learning_rate is not None
        return reach(refs["weight", "weight"], stored, stored.learning_rate, steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum"])
@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_as_many_elements_change_as_torch_changes(tmp_path, dtype, name, lr):
    torch.manual_seed(1)
    layer = torch.nn.Linear(64, 64, bias=False).to(dtype)
    optimizer = optimizers(lr)[name](layer.parameters())
    gradient = torch.randn(64, 64).to(dtype)
    for _ in range(60):
        layer.weight.grad = gradient.clone()
        optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    before = layer.weight.detach().clone()
    layer.weight.grad = gradient.clone()
    optimizer.step()
    changed = float((layer.weight != before).double().mean())
    found = looked_at(tmp_path / "c.pt")
    assert found.changed_by_one == pytest.approx(changed, abs=0.03)


def test_updates_that_are_lost_one_by_one_add_up(tmp_path):
    layer = torch.nn.Linear(8, 8, bias=False).bfloat16()
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for _ in range(30):
        layer.weight.grad = torch.ones(8, 8).bfloat16()
        optimizer.step()
    assert bool((layer.weight == 1).all())  # half the distance below 1 is 2^-9
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    found = looked_at(tmp_path / "c.pt", steps=30)
    assert (found.changed_by_one, found.changed_by_many) == (0.0, 1.0)
    assert found.rms == pytest.approx(1e-3, rel=0.02)


def test_an_optimizer_whose_rule_is_not_known_gives_nothing(tmp_path):
    layer = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Adadelta(layer.parameters())
    layer.weight.grad = torch.ones(8, 8)
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert looked_at(tmp_path / "c.pt") is None
