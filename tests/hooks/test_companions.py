"""Helpers of a training run: master weights, spectral norms, TensorBoard, the Trainer's callback."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import precisionpass
from precisionpass.errors import PrecisionPassError

RULES = [precisionpass.Rule(id="r", match=precisionpass.Match(op="attention"), apply={"record": ["max_logit"]})]
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False)).to(dtype)


def batch(step, dtype=torch.bfloat16):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(net, masters, optimizer, steps):
    for step in steps:
        net(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit(name):
    whole = model()
    masters = precisionpass.MasterWeights(whole)
    optimizer = masters.attach(OPTIMIZERS[name](masters.parameters()))
    train(whole, masters, optimizer, range(3))
    kept = copy.deepcopy((masters.state_dict(), optimizer.state_dict()))
    train(whole, masters, optimizer, range(3, 6))
    other = model()
    resumed = precisionpass.MasterWeights(other)
    again = resumed.attach(OPTIMIZERS[name](resumed.parameters()))
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    train(other, resumed, again, range(3, 6))
    for one, two in zip(masters.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two) and one.dtype == torch.float32
    for one, two in zip(whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and one.dtype == torch.bfloat16
        assert one.grad is None


def test_updates_too_small_for_16_bits_add_up():
    net, plain = (nn.Linear(1, 1, bias=False).to(torch.bfloat16) for _ in range(2))
    nn.init.constant_(net.weight, 1.0), nn.init.constant_(plain.weight, 1.0)
    masters = precisionpass.MasterWeights(net)
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=1e-4))
    lost = torch.optim.SGD(plain.parameters(), lr=1e-4)
    for _ in range(300):
        for one, step in ((net, optimizer), (plain, lost)):
            one(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            step.step()
            step.zero_grad()
    assert float(plain.weight) == 1.0, "1e-4 is below half a unit of BF16 at 1"
    assert float(masters.parameters()[0]) == pytest.approx(0.97, abs=1e-5)
    assert float(net.weight) == pytest.approx(0.97, abs=2**-9)


def test_gradients_of_micro_batches_are_summed_in_fp32():
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    masters = precisionpass.MasterWeights(net)
    for _ in range(1000):
        net(torch.full((1, 1), 0.01, dtype=torch.bfloat16)).sum().backward()
        masters.accumulate()
    exact = 1000 * float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert float(masters.parameters()[0].grad) == pytest.approx(exact, rel=1e-5) and net.weight.grad is None


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], lambda parameters: torch.optim.LBFGS(parameters, max_iter=4)])
def test_an_optimizer_may_be_given_a_closure(make):
    """LBFGS moves the weights and asks again within a step."""
    found = []
    for net in (model(torch.float32), model()):
        masters = precisionpass.MasterWeights(net)
        optimizer = masters.attach(make(masters.parameters()))

        def closure(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(batch(0, net[0].weight.dtype)).float().square().mean()
            loss.backward()
            return loss

        before = closure().item()
        optimizer.step(closure)
        found.append(closure().item() - before)
    assert found[0] < 0 and found[1] == pytest.approx(found[0], rel=0.1)


def test_other_parameters_are_their_own_masters_and_frozen_ones_are_left_out():
    net = model()
    net[2].float().requires_grad_()
    net.append(nn.Linear(2, 2)).requires_grad_(True)[3].weight.requires_grad_(False)
    named = dict(precisionpass.MasterWeights(net).named_parameters())
    assert list(named) == ["0.weight", "2.weight", "3.bias"]
    assert named["2.weight"] is net[2].weight and named["0.weight"] is not net[0].weight


def test_what_master_weights_refuse():
    net = model()
    masters = precisionpass.MasterWeights(net)
    with pytest.raises(PrecisionPassError, match="PP503 2 tensors of the optimizer are no master weights"):
        masters.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(PrecisionPassError, match=r"PP503 master weights of another model: 2\.weight"):
        masters.load_state_dict({"0.weight": torch.zeros(16, 8)})


def test_spectral_norms_and_their_growth():
    net = model(torch.float32)
    monitor = precisionpass.SpectralMonitor(net, "*.weight")
    first = monitor.update()
    for name, found in first.items():
        exact = float(torch.linalg.matrix_norm(net.get_parameter(name).detach(), ord=2))
        assert 0.97 * exact <= found.norm <= 1.0001 * exact and found.growth == 1
    with torch.no_grad():
        net[0].weight.mul_(3)
    assert monitor.update()["0.weight"].growth == pytest.approx(3, rel=0.03)
    with pytest.raises(PrecisionPassError, match="PP504 no matrix is called 'q_proj'") as raised:
        precisionpass.SpectralMonitor(net, "q_proj")
    assert "0.weight" in raised.value.why


def test_zero_matrices_have_no_norm():
    net = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(net.weight)
    monitor = precisionpass.SpectralMonitor(net)
    assert monitor.update()["weight"].norm == 0 and monitor.update()["weight"].growth == 1
    for value, norm in ((2.0, 2.0), (math.nan, math.nan), (3.0, 3.0)):  # as a LoRA that starts at zero, and a bad step
        with torch.no_grad():
            net.weight.copy_(value * torch.eye(3))
        assert monitor.update()["weight"].norm == pytest.approx(norm, rel=1e-3, nan_ok=True)


@pytest.fixture
def monitor():
    torch._dynamo.reset()
    compiled = precisionpass.compile(lambda q: (q @ q.mT).softmax(-1) @ q, rules=RULES, backend="eager")
    compiled(torch.randn(2, 3, 5, 8, requires_grad=True)).sum().backward()
    return precisionpass.monitor(compiled)


class Writer:
    """What tensorboard's SummaryWriter is asked."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


def test_figures_go_to_tensorboard(monitor):
    writer = Writer()
    monitor.write(writer, 7)
    (site,) = monitor.read()
    assert writer.seen[f"precisionpass/{site}/sequences", 7] == 2
    assert set(writer.seen) == {(f"precisionpass/{site}/{name}", 7) for name in ("sequences", "max_logit")}
    assert all(isinstance(value, float) and math.isfinite(value) for value in writer.seen.values())


def test_the_callback_of_the_trainer_reads_every_so_many_steps(monitor):
    callbacks = pytest.importorskip("transformers.trainer_callback")
    from precisionpass.hooks.callback import MonitorCallback

    writer = Writer()
    callback = MonitorCallback(monitor, every=2, on_alarm="raise", writer=writer)
    handler = callbacks.CallbackHandler([callback], None, None, None, None)
    state, arguments = callbacks.TrainerState(), SimpleNamespace()
    for state.global_step in (1, 2, 3, 4):
        handler.on_step_end(arguments, state, callbacks.TrainerControl())
    assert [entry["step"] for entry in state.log_history] == [2, 4] == [step for _, step in writer.seen][::2]
    assert any(name.endswith("/max_logit") for name in state.log_history[0])
