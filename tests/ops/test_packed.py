"""Packed sequences: each as if it were alone, whatever stands beside it; what is refused, and in which words."""

import pytest
import torch
import torch.nn.functional as F

from precisionpass.ops import jagged_attention
from precisionpass.reference.dropout import keep_mask
from tests.reference.eager import TOLERANCE, draw

attention = torch.ops.precisionpass.attention
LENGTHS = [(5, 5), (0, 3), (1, 1), (4, 0), (7, 11), (9, 2), (0, 0), (3, 3)]
PADDING = 2


def bounds(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


CU_Q, CU_K = (bounds([pair[side] for pair in LENGTHS]) for side in (0, 1))
ROWS, KEYS = int(CU_Q[-1]) + PADDING, int(CU_K[-1]) + PADDING


def parts(number):
    return slice(*CU_Q[number : number + 2].tolist()), slice(*CU_K[number : number + 2].tolist())


def alone(q, k, v, number, **settings):
    rows, keys = parts(number)
    return attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"window_left": 2}, {"window_left": 1, "window_right": 2, "delta": "recompute"}, {"dead_rows": "nan"}],
)
def test_each_sequence_is_as_if_alone(dtype, causal, settings):
    tensors = [part.requires_grad_() for part in draw(dtype, (1, 4, ROWS, 8), (1, 2, KEYS, 8), (1, 2, KEYS, 12))]
    settings = {"causal": causal, "save_residual": True, "scale": 0.3} | settings
    output, _, lse, _, _ = attention(*tensors, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **settings)
    upstream, through_lse = draw(dtype, output.shape, lse.shape, seed=3)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    found = torch.autograd.grad(
        [output, lse], tensors, [upstream, through_lse.to(lse.dtype).masked_fill(lse == -torch.inf, 0)]
    )
    expected = [torch.zeros_like(part) for part in tensors]
    for number in range(len(LENGTHS)):
        rows, _ = parts(number)
        one, _, one_lse, _, _ = alone(*tensors, number, **settings)
        torch.testing.assert_close(output[:, :, rows], one, **near)
        torch.testing.assert_close(lse[:, :, rows], one_lse)
        gradients = torch.autograd.grad(
            [one, one_lse], tensors,
            [upstream[:, :, rows], through_lse[:, :, rows].to(lse.dtype).masked_fill(one_lse == -torch.inf, 0)],
        )  # fmt: skip
        expected = [total + part for total, part in zip(expected, gradients, strict=True)]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=8 * TOLERANCE[dtype], equal_nan=True)


def test_rows_past_the_last_sequence_see_nothing():
    q, k, v = draw(torch.float32, (1, 4, ROWS, 8), (1, 2, KEYS, 8), (1, 2, KEYS, 8))
    output, _, lse, _, p = attention(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, probabilities="softmax")
    assert not output[:, :, -PADDING:].any() and bool((lse[:, :, -PADDING:] == -torch.inf).all())
    assert p.shape == (1, 4, ROWS, KEYS) and not p[..., -PADDING:].any() and not p[:, :, -PADDING:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masks_biases_and_probabilities_count_over_all_rows_and_keys(dtype):
    """One packed call is one dense call whose mask keeps sequences apart."""
    q, k, v, bias, sinks = (
        part.requires_grad_()
        for part in draw(dtype, (1, 4, 17, 8), (1, 2, 15, 8), (1, 2, 15, 8), (1, 1, 17, 15), (1, 4, 17, 1))
    )
    mask = torch.rand(1, 1, 17, 15, generator=torch.Generator().manual_seed(2)) > 0.2
    cu_q, cu_k = torch.tensor([0, 6, 17], dtype=torch.int32), torch.tensor([0, 9, 15], dtype=torch.int32)
    apart = (torch.arange(17)[:, None] < 6) == (torch.arange(15) < 9)
    settings = {"probabilities": "softmax", "softcap": 2.0}
    packed = attention(q, k, v, bias, mask, sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **settings)
    dense = attention(q, k, v, bias, mask & apart, sinks, **settings)
    upstream = draw(dtype, packed[0].shape, packed[4].shape, seed=3)
    results = [
        [out[0], out[2], out[4], *torch.autograd.grad([out[0], out[4]], [q, k, v, bias, sinks], upstream)]
        for out in (packed, dense)
    ]
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_dropout_counts_rows_over_all_and_keys_within_a_sequence():
    q, k, v = draw(torch.float32, (1, 2, 17, 8), (1, 2, 15, 8), (1, 2, 15, 8))
    cu_q, cu_k = torch.tensor([0, 6, 17], dtype=torch.int32), torch.tensor([0, 9, 15], dtype=torch.int32)
    settings = {"dropout_p": 0.25, "seed": torch.tensor([5]), "probabilities": "dropped"}
    p = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **settings)[4]
    row = torch.arange(2 * 17).view(1, 2, 17)
    for rows, keys in ((slice(0, 6), slice(0, 9)), (slice(6, 17), slice(9, 15))):
        kept = keep_mask(settings["seed"], 0.25, row[:, :, rows], slice(0, keys.stop - keys.start), 15)
        assert torch.equal(p[:, :, rows, keys] > 0, kept)


def test_a_scores_positions_are_those_within_its_sequence():
    q, k, v = draw(torch.float64, (1, 2, 10, 8), (1, 2, 10, 8), (1, 2, 10, 8))
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    found = attention(q, k, v, score="s + 0.1 * i - 0.2 * i * j + b * j", cu_seqlens_q=cu, cu_seqlens_k=cu)[0]
    for number, rows in enumerate((slice(0, 4), slice(4, 10))):
        text = f"s + 0.1 * i - 0.2 * i * j + {number} * j"
        one = attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], score=text)[0]
        torch.testing.assert_close(found[:, :, rows], one)


def test_one_compilation_serves_every_number_of_sequences():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, cu):
        return attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal="top_left", save_residual=True)[0]

    compiled = torch.compile(attend, backend=counter, dynamic=True)
    for lengths in ([3, 4], [9, 2, 5], [1, 6, 30, 2]):
        cu = bounds(lengths)
        tensors = [part.requires_grad_() for part in draw(torch.bfloat16, *[(1, 2, sum(lengths), 8)] * 3)]
        results = [attend(*tensors, cu), compiled(*tensors, cu)]
        assert torch.equal(*results)
        gradients = [torch.autograd.grad(result.float().sum(), tensors) for result in results]
        assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", [{"causal": "bottom_right", "save_residual": True}, {"probabilities": "softmax"}])
def test_opcheck(settings):
    shapes = [(1, 4, ROWS, 8), (1, 2, KEYS, 8), (1, 2, KEYS, 12)]
    tensors = [part.requires_grad_() for part in draw(torch.bfloat16, *shapes)]
    settings = settings | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    assert set(torch.library.opcheck(attention.default, tuple(tensors), settings).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("changed", "kind", "what", "way_out"),
    [
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_q is given alone", "in self-attention they are the same"),
        ({"cu_seqlens_q": CU_Q.long()}, TypeError, "cu_seqlens_q is int64", "to(torch.int32)"),
        ({"cu_seqlens_q": CU_Q[None]}, ValueError, "cu_seqlens_q has 2 dimensions", "one dimension"),
        ({"cu_seqlens_q": CU_Q[:-1]}, ValueError, "have 8 and 9 numbers", "repeats its beginning"),
        ({"cu_seqlens_k": CU_K[:0], "cu_seqlens_q": CU_Q[:0]}, ValueError, "have 0 and 0 numbers", "sequences + 1"),
        ({"cu_seqlens_q": CU_Q + 1}, ValueError, "does not ascend from 0", "cumsum"),
        ({"cu_seqlens_q": CU_Q.flip(0)}, ValueError, "does not ascend from 0", "cumsum"),
        ({"cu_seqlens_k": CU_K * 2}, ValueError, f"at most {KEYS}", "cumsum"),
        ({"q": torch.zeros(2, 4, ROWS, 8), "k": torch.zeros(2, 2, KEYS, 8), "v": torch.zeros(2, 2, KEYS, 8)},
         ValueError, "in a batch of 2", "flatten the batch"),
    ],
)  # fmt: skip
def test_what_is_refused(changed, kind, what, way_out):
    q, k, v = draw(torch.float32, (1, 4, ROWS, 8), (1, 2, KEYS, 8), (1, 2, KEYS, 8))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changed
    with pytest.raises(kind) as caught:
        attention(**arguments)
    assert what in str(caught.value) and way_out in str(caught.value)


def test_nested_tensors_go_through_as_they_are():
    """Lengths 3, 0, 5 and their gradients are those of each sequence alone."""
    q, k, v = (
        torch.nested.nested_tensor(
            [torch.randn(length, 2, 8, dtype=torch.float64) for length in lengths], layout=torch.jagged
        ).requires_grad_()
        for lengths in ([3, 0, 5], [2, 4, 5], [2, 4, 5])
    )
    output = jagged_attention(*(part.transpose(1, 2) for part in (q, k, v)), causal="bottom_right", scale=0.3)
    assert output.layout == torch.jagged and torch.equal(output.offsets(), q.offsets())
    gradients = torch.autograd.grad(output.values().square().sum(), (q, k, v))
    for number, one in enumerate(output.unbind()):
        alone = [part.unbind()[number].detach().transpose(0, 1)[None].requires_grad_() for part in (q, k, v)]
        expected = attention(*alone, causal="bottom_right", scale=0.3)[0]
        torch.testing.assert_close(one, expected[0])
        for found, want in zip(gradients, torch.autograd.grad(expected.square().sum(), alone), strict=True):
            torch.testing.assert_close(found.unbind()[number].transpose(0, 1), want[0])


def test_other_layouts_are_refused():
    jagged = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    plain, flat = torch.randn(2, 3, 4, 8), torch.nested.nested_tensor([torch.randn(3, 8)], layout=torch.jagged)
    for wrong in (plain, flat, jagged):
        with pytest.raises(ValueError, match=r"(?s)q is not a nested .* scaled_dot_product_attention") as caught:
            jagged_attention(wrong, jagged.transpose(1, 2), jagged.transpose(1, 2))
        assert "unflatten" in str(caught.value)
