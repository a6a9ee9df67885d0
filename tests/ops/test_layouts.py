"""What the op returns: formats, strides, what is made only when asked, and what the input's strides may be."""

import pytest
import torch

import precisionpass.ops  # noqa: F401

attention = torch.ops.precisionpass.attention


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_formats_and_strides(dtype):
    q, k, v = draw(2, 4, 6, 8, dtype=dtype), draw(2, 2, 5, 8, dtype=dtype), draw(2, 2, 5, 12, dtype=dtype)
    output, residual, lse, max_logits, probabilities = attention(
        q, k, v, save_residual=True, return_max_logits=True, probabilities="softmax"
    )
    statistics = torch.promote_types(dtype, torch.float32)
    assert output.dtype == dtype and output.transpose(1, 2).is_contiguous() and output.shape == (2, 4, 6, 12)
    assert lse.dtype == max_logits.dtype == statistics and lse.shape == (2, 4, 6) and max_logits.shape == (2, 4)
    assert probabilities.dtype == dtype and probabilities.shape == (2, 4, 6, 5)
    rounded = dtype in (torch.bfloat16, torch.float16)
    assert residual.dtype == torch.int8 and residual.shape == (output.shape if rounded else (0,))
    assert residual.any() or not rounded


def test_nothing_is_made_that_was_not_asked_for():
    _, residual, _, max_logits, probabilities = attention(*[draw(1, 2, 3, 4)] * 3)
    assert residual.shape == max_logits.shape == probabilities.shape == (0,)


def test_gradients_have_the_layout_that_split_heads_have():
    q, k, v = (draw(2, 4, 6, 8).requires_grad_() for _ in range(3))
    for gradient in torch.autograd.grad(attention(q, k, v)[0].sum(), (q, k, v)):
        assert gradient.transpose(1, 2).is_contiguous()


def test_only_the_gradients_that_are_needed_are_made():
    q, k, v = (draw(2, 4, 6, 8) for _ in range(3))
    output, residual, lse, _, _ = attention(q, k, v, save_residual=True)
    empty = (None, None, None, [], None, None, None)
    for place in range(3):
        needs = [index == place for index in range(5)]
        made = torch.ops.precisionpass.attention_backward(
            output, None, None, output, residual, lse, q, k, v, *empty, needs, save_residual=True
        )
        assert [part.numel() > 0 for part in made[:5]] == needs


def variants():
    base = draw(2, 4, 6, 8)
    yield "heads last", base.transpose(1, 2).contiguous().transpose(1, 2)
    yield "width not last", base.transpose(2, 3).contiguous().transpose(2, 3)
    yield "every second row", torch.stack([base, base], 3).flatten(2, 3)[:, :, ::2]
    yield "flipped heads and offset", torch.cat([base[:, :1], base], 1)[:, 1:]


@pytest.mark.parametrize("strided", [pytest.param(value, id=name) for name, value in variants()])
def test_strides_change_nothing(strided):
    plain = [strided.contiguous().requires_grad_() for _ in range(3)]
    other = [strided.detach().requires_grad_() for _ in range(3)]
    results = []
    for parts in (plain, other):
        output = attention(*parts, save_residual=True, causal="top_left")[0]
        results.append([output, *torch.autograd.grad(output.float().square().sum(), parts)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_broadcast_inputs():
    """CASES 17: a key batch of one, expanded; each of its copies gets a gradient, and expand sums them."""
    q, k, v = draw(2, 4, 6, 8).requires_grad_(), draw(1, 4, 6, 8).requires_grad_(), draw(1, 4, 6, 8).requires_grad_()
    wide = attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), save_residual=True)[0]
    copied = attention(q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1), save_residual=True)[0]
    assert torch.equal(wide, copied)
    for one, two in zip(
        torch.autograd.grad(wide.sum(), (q, k, v)), torch.autograd.grad(copied.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("heads", [(1, 1), (0, 0), (4, 2)])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 7), (7, 1), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_small_and_empty_sizes_are_as_eager(batch, heads, lengths, causal):
    """CASES 16. Rows without a key are zeros and -inf here, where eager has NaN."""
    (count, shared), (queries, keys) = heads, lengths
    q = draw(batch, count, queries, 8, dtype=torch.float32).requires_grad_()
    k, v = (draw(batch, shared, keys, 8, dtype=torch.float32).requires_grad_() for _ in range(2))
    output, _, lse, _, probabilities = attention(q, k, v, causal=causal, probabilities="softmax")
    assert output.shape == q.shape and probabilities.shape == (batch, count, queries, keys)
    gradients = torch.autograd.grad(output.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert [part.shape for part in gradients] == [q.shape, k.shape, v.shape]
    assert all(bool(part.isfinite().all()) for part in (output, *gradients))
    if causal == "none" and keys and shared:
        group = count // shared
        scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
        torch.testing.assert_close(output, scores.softmax(-1) @ v.repeat_interleave(group, 1))
    if not keys:
        assert not output.any() and bool((lse == -torch.inf).all())
