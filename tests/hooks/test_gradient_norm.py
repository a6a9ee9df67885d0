"""clip_grad_norm_: the norm, what it refuses, and two processes, where monitors read together too."""

import os

import pytest
import torch
from torch import distributed, multiprocessing, nn

import precisionpass
from precisionpass.errors import PrecisionPassError
from tests.features.test_distributed import batches, free_port
from tests.small_models import Stack


def with_gradients(dtype=torch.float32, size=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = (size * torch.randn_like(parameter, dtype=torch.float32)).to(dtype)
    return model


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_it_is_torchs_in_fp32(max_norm):
    ours, theirs = with_gradients(), with_gradients()
    found = precisionpass.clip_grad_norm_(ours.parameters(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(found.float(), expected)
    for one, two in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_an_infinite_bound_measures_and_changes_nothing():
    model = with_gradients()
    before = gradients(model)
    assert 0 < float(precisionpass.clip_grad_norm_(model, float("inf"))) < torch.inf
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


def test_sums_of_16_bits_are_not():
    """600 gradients of 0.01 each, in BF16: 0.0625 is where a BF16 sum of their squares stops growing."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(600)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(torch.tensor(0.01, dtype=torch.bfloat16)) * 600**0.5
    assert float(precisionpass.clip_grad_norm_(parameters, 1e6)) == pytest.approx(exact, rel=1e-6)
    large = with_gradients(torch.float16, size=6e4 / 5)
    expected = float(torch.cat([gradient.double().flatten() for gradient in gradients(large)]).norm())
    assert float(precisionpass.clip_grad_norm_(large, 1.0)) == pytest.approx(expected, rel=1e-6)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(large))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_is_named_and_nothing_is_changed(value):
    model = with_gradients()
    model[1].weight.grad[2, 3] = value
    before = gradients(model)
    said = r"PP502 the norm of the gradient of 1\.weight is not finite"
    with pytest.raises(PrecisionPassError, match=said) as raised:
        precisionpass.clip_grad_norm_(model, 0.5)
    assert "1 of 4 gradients" in raised.value.why
    assert not bool(precisionpass.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=False).isfinite())
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0, equal_nan=True)


def test_no_gradients_and_a_norm_that_is_none():
    assert float(precisionpass.clip_grad_norm_(nn.Linear(2, 2), 1.0)) == 0
    with pytest.raises(PrecisionPassError, match="max_norm is 0"):
        precisionpass.clip_grad_norm_(nn.Linear(2, 2), 0)


RULES = [
    precisionpass.Rule(id="r", match=precisionpass.Match(op="attention"), apply={"record": ["amax", "delta_bias"]})
]


def fresh():
    torch.manual_seed(0)
    return Stack(1)


def one_step(model, x):
    """(norm, whole gradients after clipping)."""
    model(x).square().mean().backward()
    norm = precisionpass.clip_grad_norm_(model, 0.01)
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return float(norm), whole


def with_masters(model, x):
    """The masters, whole, after a step of a BF16 model."""
    masters = precisionpass.MasterWeights(model)
    optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-2))
    model(x.to(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert all(parameter.dtype == torch.bfloat16 and parameter.grad is None for parameter in model.parameters())
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in masters.parameters()]


def worker(rank, port, truth, figures, stepped):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        part = batches()[2 * rank : 2 * rank + 2]
        compiled = precisionpass.compile(fresh(), rules=RULES, backend="aot_eager")
        for model in (
            nn.parallel.DistributedDataParallel(compiled),
            fully_shard(fresh(), mesh=init_device_mesh("cpu", (2,))),
        ):
            norm, found = one_step(model, part)
            assert norm == pytest.approx(truth[0], rel=1e-5)
            for ours, theirs in zip(found, truth[1], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
        sharded_norms = precisionpass.SpectralMonitor(fully_shard(fresh(), mesh=init_device_mesh("cpu", (2,)))).update()
        for name, whole in precisionpass.SpectralMonitor(fresh()).update().items():
            assert sharded_norms[name].norm == pytest.approx(whole.norm, rel=1e-5)
        sharded = with_masters(fully_shard(fresh().to(torch.bfloat16), mesh=init_device_mesh("cpu", (2,))), part)
        for ours, theirs in zip(sharded, stepped, strict=True):
            assert float((ours - theirs).abs().mean()) < 1e-3, "the step is 1e-2, and gradients are rounded"
        for name, site in precisionpass.monitor(compiled).read().items():
            assert site["sequences"] == figures[name]["sequences"] == 4
            for figure in ("amax_q", "amax_output"):
                assert site[figure] == pytest.approx(figures[name][figure], rel=1e-5)
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no distributed")
def test_two_processes_have_the_norm_and_the_figures_of_one():
    model = precisionpass.compile(fresh(), rules=RULES, backend="aot_eager")
    truth = one_step(model, batches())
    figures = precisionpass.monitor(model).read()
    stepped = [one.detach() for one in with_masters(fresh().to(torch.bfloat16), batches())]
    multiprocessing.spawn(worker, args=(free_port(), truth, figures, stepped), nprocs=2, join=True)
