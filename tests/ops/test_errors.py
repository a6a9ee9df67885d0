"""Refusals: each names the argument, says why, and shows the way out."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.errors import PrecisionPassError

ops = torch.ops.precisionpass


def draw(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q, K = draw(2, 4, 6, 8), draw(2, 2, 5, 8)
LOW = K.bfloat16()

REFUSED = [
    ({"q": Q.bfloat16()}, ValueError, "q, k and v are bfloat16, float32, float32", "convert them to one dtype"),
    ({"q": Q.int(), "k": K.int(), "v": K.int()}, TypeError, "q is int32", "q.to(torch.bfloat16)"),
    ({"q": Q.to(torch.float8_e4m3fn)}, TypeError, "q is float8_e4m3fn", "bfloat16, float16, float32 and float64"),
    ({"k": draw(2, 3, 5, 8), "v": draw(2, 3, 5, 8)}, ValueError, "4 query heads over 3 key heads", "divides"),
    ({"k": draw(1, 2, 5, 8)}, ValueError, "do not belong together", "expand a broadcast batch"),
    ({"v": draw(2, 2, 4, 8)}, ValueError, "do not belong together", "q [B, H, Sq, D]"),
    ({"q": draw(4, 6, 8)}, ValueError, "q has 3 dimensions", "unsqueeze"),
    ({"bias": draw(2, 4, 6, 4)}, ValueError, "bias [2, 4, 6, 4] does not broadcast to [2, 4, 6, 5]", "expand"),
    ({"bias": draw(6, 5)}, ValueError, "bias has 2 dimensions", "a size of 1 broadcasts"),
    ({"bias": draw(1, 1, 1, 5, dtype=torch.int64)}, TypeError, "bias is int64", "bias.to("),
    ({"mask": draw(1, 1, 1, 5)}, TypeError, "mask is float32", "pass it as bias"),
    ({"mask": draw(3, 1, 1, 5).bool()}, ValueError, "mask [3, 1, 1, 5]", "expand"),
    ({"sinks": draw(1, 4, 1, 5)}, ValueError, "sinks [1, 4, 1, 5] does not broadcast to [2, 4, 6, 1]", "expand"),
    ({"score_inputs": [draw(1, 1, 1, 5).int()], "score": "s + t0"}, TypeError, "score_inputs[0] is int32", "convert"),
    ({"score_inputs": [draw(1, 1, 1, 4)], "score": "s + t0"}, ValueError, "score_inputs[0] [1, 1, 1, 4]", "expand"),
    ({"score": "s + t0"}, ValueError, "score reads t0", "pass the tensor in score_inputs"),
    ({"score": "s ** 2"}, ValueError, "'s ** 2' is outside the grammar", "leaves scores as they are"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p is 0.1", "seed=torch.randint"),
    ({"dropout_p": 0.1, "seed": torch.tensor([1.0])}, ValueError, "dropout_p is 0.1", "int64"),
    ({"dropout_p": 0.1, "seed": torch.tensor([1, 2])}, ValueError, "seed has 2 elements", "one int64"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5", "from 0 to 1"),
    ({"causal": "upper"}, ValueError, "causal is 'upper'", "none, top_left, bottom_right"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0", "0 switches it off"),
    ({"logit_clip": "hard"}, ValueError, "logit_clip_max is 0.0", "a number above 0"),
    ({"grad_clip_kind": "norm"}, ValueError, "grad_clip is 0.0", "a number above 0"),
    ({"row_max_shift": [2.0]}, ValueError, "row_max_shift is (2.0,)", "three numbers"),
    ({"row_max_shift": [2.0, 60.0, 0.0]}, ValueError, "limit <= 40", "[2.0, 8.0, 0.0]"),
    ({"matmul": "fp8_e4m3"}, ValueError, "matmul is 'fp8_e4m3'", '"qk=fp8_e4m3 pv=fp8_e4m3 scale=head"'),
    ({"matmul": "qk=fp8_e4m3"}, TypeError, "FP8 products of float32", "convert q, k and v"),
    ({"q": LOW, "k": LOW, "v": LOW, "matmul": "qk=fp8_e4m3", "delta": "output"}, ValueError, "errors of FP8", "resid"),
    ({"fp8_scales": [torch.ones(1)]}, NotImplementedError, "fp8_scales is reserved", "leave it out"),
    ({"on_nonfinite": "raise"}, ValueError, 'on_nonfinite="raise" without record', '"zero" or "keep"'),
    ({"implementation": "triton"}, ValueError, 'implementation="triton" cannot', "falls back to the reference"),
]


@pytest.mark.parametrize(("changed", "kind", "what", "way_out"), REFUSED)
def test_attention(changed, kind, what, way_out):
    arguments = {"q": Q, "k": K, "v": K} | changed
    with pytest.raises(kind) as caught:
        ops.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    message = str(caught.value)
    assert isinstance(caught.value, PrecisionPassError)
    assert what in message and way_out in message, message
    assert "\n  why: " in message and "\n  fix: " in message


def test_a_shift_needs_the_consistent_normaliser():
    with pytest.raises(ValueError, match="a normaliser of unrounded P biases every row"):
        ops.attention(Q.bfloat16(), K.bfloat16(), K.bfloat16(), row_max_shift=[2.0, 8.0, 0.0], normaliser="float32")
    with pytest.raises(ValueError, match="limit <= 2"):
        ops.attention(LOW, LOW, LOW, row_max_shift=[2.0, 8.0, 0.0], matmul="pv=fp8_e4m3")
    with pytest.raises(ValueError, match="limit <= 8"):
        ops.attention(Q.half(), K.half(), K.half(), row_max_shift=[2.0, 20.0, 0.0])


@pytest.mark.parametrize(
    ("call", "kind", "what"),
    [
        (lambda: ops.softmax(Q.int(), -1), TypeError, "softmax: x is int32"),
        (lambda: ops.log_softmax(Q.int(), -1), TypeError, "log_softmax: x is int32"),
        (lambda: ops.layer_norm(Q, 5, None, None, 1e-5), ValueError, "layer_norm: dims is 5"),
        (lambda: ops.layer_norm(Q, 0, None, None, 1e-5), ValueError, "layer_norm: dims is 0"),
        (lambda: ops.layer_norm(Q, 1, draw(7), None, 1e-5), ValueError, r"layer_norm: weight \[7\]"),
        (lambda: ops.rms_norm(Q, 1, None, draw(1, 8), 1e-5), ValueError, r"rms_norm: bias \[1, 8\]"),
        (lambda: ops.rms_norm(Q.int(), 1, None, None, 1e-5), TypeError, "rms_norm: x is int32"),
        (lambda: ops.add_norm(Q, Q.half(), 1, None, None, 1e-5, True), ValueError, "residual is torch.float16"),
        (lambda: ops.add_norm(Q, Q[:1], 1, None, None, 1e-5, True), ValueError, r"residual \[1, 4, 6, 8\] differ"),
    ],
)
def test_softmax_and_norms(call, kind, what):
    with pytest.raises(kind, match=what):
        call()


def test_a_wrong_format_is_refused_while_compiling_too():
    with pytest.raises(Exception, match="q, k and v are bfloat16, float32, float32"):
        torch.compile(lambda q, k: ops.attention(q, k, k), backend="aot_eager")(Q.bfloat16(), K)
