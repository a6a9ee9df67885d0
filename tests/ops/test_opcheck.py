"""torch's own check of every op: schema, fake (dtypes, sizes, strides), autograd, tracing with symbolic sizes."""

import pytest
import torch

import precisionpass.ops  # noqa: F401

ops = torch.ops.precisionpass
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def tensor(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_(grad)


def check(op, arguments, settings=None):
    assert set(torch.library.opcheck(op.default, arguments, settings or {}).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {"causal": "top_left"},
        {"causal": "bottom_right", "save_residual": True, "scale": 0.25},
        {"probabilities": "softmax", "return_max_logits": True, "window_left": 3},
        {"delta": "recompute", "normaliser": "float32", "dead_rows": "nan", "softcap": 3.0},
    ],
)
def test_attention(dtype, settings):
    tensors = [tensor(2, 4, 6, 8, dtype=dtype), tensor(2, 2, 5, 8, dtype=dtype), tensor(2, 2, 5, 12, dtype=dtype)]
    check(ops.attention, tensors, settings)


def test_attention_with_every_tensor():
    tensors = [tensor(2, 4, 6, 8), tensor(2, 2, 5, 8), tensor(2, 2, 5, 12)]
    bias, sinks = tensor(1, 4, 6, 5), tensor(1, 4, 1, 1)
    mask = torch.rand(2, 1, 6, 5) > 0.3
    inputs, seed = [tensor(1, 4, 1, 1), mask], torch.tensor([3])
    settings = {"score": "where(t1, s * t0, s)", "dropout_p": 0.2, "probabilities": "dropped"}
    check(ops.attention, (*tensors, bias, mask, sinks, inputs, seed), settings)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 1, 1, 1)])
def test_attention_of_small_and_empty_sizes(shape):
    check(ops.attention, [tensor(*shape, dtype=torch.bfloat16) for _ in range(3)], {"save_residual": True})


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_from_strided_inputs(dtype):
    heads_last = [tensor(2, 6, 4, 8, dtype=dtype, grad=False).transpose(1, 2) for _ in range(3)]
    check(ops.attention, [part.requires_grad_() for part in heads_last], {"save_residual": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax])
def test_softmax(op, dtype):
    x = tensor(3, 4, 5, dtype=dtype, grad=False).transpose(0, 1).requires_grad_()
    check(op, (x, 1))
    check(op, (x, -1, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "more"), [(ops.layer_norm, ()), (ops.rms_norm, (1.0, True))])
def test_norms(op, more, dtype):
    x = tensor(3, 4, 5, dtype=dtype, grad=False).transpose(0, 1).requires_grad_()
    check(op, (x, 1, tensor(5), tensor(5, dtype=torch.bfloat16), 1e-5, *more))
    check(op, (x, 2, None, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center", [True, False])
def test_a_norm_of_a_sum(center, dtype):
    residual = tensor(4, 3, 5, dtype=dtype)
    x = tensor(3, 4, 5, dtype=dtype, grad=False).transpose(0, 1).requires_grad_()
    check(ops.add_norm, (x, residual, 1, tensor(5), tensor(5, dtype=torch.bfloat16), 1e-5, center))
    check(ops.add_norm, (x, residual, 2, None, None, 1e-5, center, 0.0, torch.float32))


def test_backward_ops():
    x, gradient = tensor(3, 5, grad=False), tensor(3, 5, grad=False)
    check(ops.softmax_backward, (gradient, x, None, 1))
    check(ops.log_softmax_backward, (gradient, x.bfloat16(), None, 1))
    weight = tensor(5, grad=False)
    _, mean, rstd = ops.layer_norm(x, 1, weight, None, 1e-5)
    check(ops.layer_norm_backward, (gradient, x, 1, weight, None, mean, rstd, [True, True, False]))
    check(ops.rms_norm_backward, (gradient, x, 1, weight, None, rstd, 0.0, [True, False, False]))
    check(ops.add_norm_backward, (gradient, x, x, 1, weight, None, mean, rstd, True, 0.0, [True, True, False]))
    check(ops.add_norm_backward, (gradient, None, x, 1, None, None, mean, rstd, False, 1.0, [True, False, False]))
    q, k, v = (tensor(1, 2, 3, 4, dtype=torch.bfloat16, grad=False) for _ in range(3))
    output, residual, lse, _, _ = ops.attention(q, k, v, save_residual=True)
    check(
        ops.attention_backward,
        (
            output,
            lse,
            None,
            output,
            residual,
            lse,
            q,
            k,
            v,
            None,
            None,
            None,
            [],
            None,
            None,
            None,
            [True] * 3 + [False] * 2,
        ),
        {"save_residual": True},
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_observe(dtype):
    """An op that records nothing here, as nobody knows its site: what it gives is a copy."""
    tensors = [tensor(2, 4, 6, 8, dtype=dtype, grad=False), *(tensor(2, 2, 5, 8, dtype=dtype, grad=False),) * 2]
    output = tensor(2, 6, 4, 8, dtype=dtype, grad=False).transpose(1, 2).requires_grad_()
    mask = torch.rand(2, 1, 6, 5) > 0.3
    settings = {"causal": "bottom_right", "score": "s * t0", "record": "nobody/site"}
    check(ops.observe, (output, *tensors, None, mask, None, [tensor(1, 4, 1, 1, grad=False)]), settings)
    found = ops.observe(output, *tensors)
    assert torch.equal(found, output) and found.stride() == output.stride() and found.data_ptr() != output.data_ptr()
