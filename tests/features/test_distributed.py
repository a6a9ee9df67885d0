"""Two processes on one machine: DistributedDataParallel and fully_shard, each against the same model on one process."""

import os
import socket

import pytest
import torch
from torch import distributed, multiprocessing, nn

import precisionpass
from tests.agreement import counts
from tests.small_models import Stack

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no distributed")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def batches() -> torch.Tensor:
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))


def fresh_model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(2)


def expected() -> list[torch.Tensor]:
    """Parameters after two steps of one process over the whole batch."""
    model = fresh_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(batches()).square().mean().backward()
        optimiser.step()
    return [p.detach().clone() for p in model.parameters()]


WAYS = ("ddp", "ddp around a compiled model", "fully_shard", "fully_shard, blocks")


def worker(rank: int, port: int, truth: list[torch.Tensor]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for how in WAYS:
            torch._dynamo.reset()
            train(rank, how, truth)
    finally:
        distributed.destroy_process_group()


def train(rank: int, how: str, truth: list[torch.Tensor]) -> None:
    model, compiled = prepared(how)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(batches()[2 * rank : 2 * rank + 2]).square().mean().backward()
        optimiser.step()
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-4, atol=1e-6, msg=lambda text: f"{how}: {text}")
    rewritten = [counts(precisionpass.report(each)).get("attention", 0) for each in compiled]
    assert sum(rewritten) >= 1, f"{how}: nothing was rewritten"


def prepared(how: str) -> tuple[nn.Module, list[nn.Module]]:
    """(the model to train, what was compiled)."""
    model = fresh_model()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        return model, [precisionpass.compile(model, backend="aot_eager")]
    if how == "ddp around a compiled model":
        precisionpass.compile(model, backend="aot_eager")
        return nn.parallel.DistributedDataParallel(model), [model]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = list(model) if how == "fully_shard, blocks" else [model]
    return model, [precisionpass.compile(part, backend="aot_eager") for part in parts]


def test_two_processes():
    """The parameters after two steps are those of one process over the whole batch, whichever way they are split."""
    multiprocessing.spawn(worker, args=(free_port(), expected()), nprocs=2, join=True)
