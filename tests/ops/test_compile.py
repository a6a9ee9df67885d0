"""Under torch.compile the ops give the figures of eager, copy no input and do not compile again per length."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import metrics

import precisionpass.ops  # noqa: F401

ops = torch.ops.precisionpass
BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_compiler(no_cached_backward):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def step(function, tensors):
    leaves = [part.detach().requires_grad_(part.is_floating_point()) for part in tensors]
    outputs = function(*leaves)
    loss = sum(part.double().square().sum() for part in outputs if part.requires_grad)
    wanted = [part for part in leaves if part.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, wanted)]


FUNCTIONS = {
    "attention": (
        lambda q, k, v, bias, sinks, t0: ops.attention(
            q, k, v, bias, None, sinks, [t0], score="s * t0", save_residual=True, probabilities="softmax", scale=0.3
        ),
        [draw(2, 4, 6, 8), draw(2, 2, 5, 8), draw(2, 2, 5, 8), draw(1, 4, 6, 5), draw(1, 4, 1, 1), draw(1, 1, 6, 1)],
    ),
    "attention with dropout": (
        lambda q, k, v, seed: ops.attention(q, k, v, seed=seed, dropout_p=0.3, causal="top_left", save_residual=True),
        [draw(2, 4, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8), torch.tensor([7])],
    ),
    "softmax": (lambda x: [ops.softmax(x, -1)], [draw(3, 9)]),
    "log_softmax": (lambda x: [ops.log_softmax(x, -1)], [draw(3, 9)]),
    "layer_norm": (lambda x, w: ops.layer_norm(x, 1, w, None, 1e-5), [draw(3, 9), draw(9)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, 1, w, None, 1e-5, 1.0), [draw(3, 9), draw(9)]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_figures_and_strides_are_those_of_eager(name, backend):
    function, tensors = FUNCTIONS[name]
    eager = step(function, tensors)
    compiled = step(torch.compile(function, backend=backend), tensors)
    for one, two in zip(eager, compiled, strict=True):
        assert torch.equal(one, two) and one.stride() == two.stride() and one.dtype == two.dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_residual_survives_compilation(backend):
    q, k, v = draw(3, 2, 4, 6, 8)

    def attend(q, k, v):
        return ops.attention(q * 2, k, v, scale=0.1, save_residual=True)[1]

    residual = torch.compile(attend, backend=backend)(q, k, v)
    assert float((residual != 0).float().mean()) > 0.9
    assert torch.equal(residual, attend(q, k, v))


def test_no_copy_of_q_k_v_is_made():
    """Heads split by view and transpose go in, and out again, without a generated kernel."""

    def attend(qkv):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in qkv.chunk(3, -1))
        return ops.attention(q, k, v, causal="top_left", save_residual=True)[0].transpose(1, 2).flatten(2)

    qkv = draw(2, 6, 96)
    metrics.reset()
    result = torch.compile(attend, backend="inductor")(qkv)
    assert metrics.generated_kernel_count == 0
    assert torch.equal(result, attend(qkv))


def test_one_compilation_serves_every_length():
    """CASES 18: another length, then back."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v):
        return ops.attention(q, k, v, causal="bottom_right", save_residual=True, probabilities="softmax")[:3]

    compiled = torch.compile(attend, backend=counter, dynamic=True)
    for queries, keys in [(6, 9), (17, 33), (5, 64), (6, 9)]:
        tensors = [draw(2, 4, queries, 8), draw(2, 2, keys, 8), draw(2, 2, keys, 8)]
        for one, two in zip(step(attend, tensors), step(compiled, tensors), strict=True):
            assert torch.equal(one, two)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpointed_block_sees_the_same_dropout(backend):
    """CASES 20, at the op: the seed is a tensor of the graph, so the recomputation reads the same one."""
    from torch.utils.checkpoint import checkpoint

    def block(x, seed):
        return ops.attention(x, x, x, seed=seed, dropout_p=0.5, save_residual=True)[0]

    def model(x, seed):
        return [checkpoint(block, x.sin(), seed, use_reentrant=False)]

    tensors = [draw(2, 4, 6, 8), torch.tensor([11])]
    plain = step(lambda x, seed: [block(x.sin(), seed)], tensors)
    for function in (model, torch.compile(model, backend=backend)):
        for one, two in zip(plain, step(function, tensors), strict=True):
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
            assert torch.equal(one[one == 0], two[one == 0])
