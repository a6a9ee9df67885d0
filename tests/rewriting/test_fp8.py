"""FP8 products by rule: what reaches the op, and what becomes of a device or a site that has none."""

import logging

import pytest
import torch

import precisionpass
from precisionpass import Match, PrecisionPassError, Rule
from precisionpass.numerics import fp8

BOTH = {"qk": "fp8_e4m3", "pv": "fp8_e4m3"}


def attend(q, k, v):
    return (q @ k.mT / 8).softmax(-1) @ v


def tensors(dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 33, 64, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


def compiled(apply, backend="eager"):
    torch._dynamo.reset()
    return precisionpass.compile(
        attend, rules=[Rule(id="r", match=Match(op="attention"), apply=apply)], backend=backend
    )


def site_of(call):
    (site,) = precisionpass.report(call).sites
    return site


@pytest.fixture
def with_fp8(monkeypatch):
    monkeypatch.setattr("precisionpass.decide.has_fp8", lambda device: True)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("matmul", "text"),
    [
        (BOTH, "qk=fp8_e4m3 pv=fp8_e4m3 scale=head"),
        ({"qk": "fp8_e5m2", "scale": "row"}, "qk=fp8_e5m2 scale=row"),
        ({"pv": "fp8_e4m3", "scale": "block"}, "pv=fp8_e4m3 scale=block"),
    ],
)
def test_the_products_of_the_rule_are_those_of_the_op_and_the_gradients_are_of_16_bits(matmul, text, backend):
    inputs = tensors()
    call = compiled({"implementation": "reference", "matmul": matmul}, backend)
    output = call(*inputs)
    expected, *_ = torch.ops.precisionpass.attention(*inputs, scale=0.125, matmul=text)
    plain, *_ = torch.ops.precisionpass.attention(*inputs, scale=0.125, save_residual=True)
    assert torch.equal(output, expected) and not torch.equal(output, plain)
    upstream = torch.randn_like(output)
    for found, wanted in zip(
        torch.autograd.grad(output, inputs, upstream), torch.autograd.grad(plain, inputs, upstream), strict=True
    ):
        assert torch.equal(found, wanted)


def test_a_device_without_fp8_is_refused_and_the_rules_decide_how_loudly(caplog):
    call = compiled({"matmul": BOTH})
    inputs = tensors()
    assert torch.equal(call(*inputs), attend(*inputs))
    assert (site_of(call).decision, site_of(call).reason) == ("refused", "no_fp8")
    assert "cannot be rewritten" in caplog.text and "on_missing_fp8: refuse" in caplog.text


def test_on_refused_error_stops_the_call(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("version: 1\nextends: fp8-attention\non_refused: error\n")
    torch._dynamo.reset()
    call = precisionpass.compile(attend, rules=path, backend="eager")
    with pytest.raises(PrecisionPassError, match="this device has none"):
        call(*tensors())


def test_without_fp8_by_rule_it_computes_in_16_bits_and_says_so_whatever_on_refused_says(caplog):
    call = compiled({"matmul": BOTH, "on_missing_fp8": "bf16"})
    inputs = tensors()
    with caplog.at_level(logging.WARNING, logger="precisionpass"):
        output = call(*inputs)
    assert torch.equal(output, torch.ops.precisionpass.attention(*inputs, scale=0.125, save_residual=True)[0])
    site = site_of(call)
    assert (site.decision, site.reason) == ("rewritten", "without_fp8") and "matmul" not in site.settings
    assert "1 site(s) without the FP8 of a rule, as this device has none" in caplog.text
    assert "without the FP8 products that a rule asks for" in str(precisionpass.report(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_computes_in_32_bits_or_more_is_refused(dtype, with_fp8):
    call = compiled({"matmul": BOTH, "implementation": "reference"})
    call(*tensors(dtype))
    assert (site_of(call).decision, site_of(call).reason) == ("refused", "fp8_of_32_bits")


def test_a_shift_must_leave_room_for_a_p_in_fp8(with_fp8):
    for limit, decision in ((8.0, "refused"), (2.0, "rewritten")):
        call = compiled({"matmul": BOTH, "row_max_shift": {"limit": limit}, "implementation": "reference"})
        call(*tensors())
        assert site_of(call).decision == decision
    call = compiled({"matmul": {"qk": "fp8_e4m3"}, "row_max_shift": {"limit": 8.0}, "implementation": "reference"})
    call(*tensors())
    assert site_of(call).decision == "rewritten"


def test_the_preset_on_a_model_that_has_no_memory_yet():
    report = precisionpass.explain(attend, tuple(tensors(device="meta")), rules="fp8-attention")
    assert [site.decision for site in report.sites] == ["rewritten"]
    assert report.sites[0].settings["matmul"]["value"] == BOTH | {"scale": "head", "recipe": "current"}
    assert "matmul=" in str(report) and "fp8_e4m3" in str(report)


def test_which_devices_have_it(monkeypatch):
    assert fp8.has_fp8("meta") and not fp8.has_fp8("cpu") and not fp8.has_fp8("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert fp8.has_fp8("cuda") is has
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not fp8.has_fp8("cuda")


def test_its_error_against_float64_is_measured_beside_the_models_own():
    rule = Rule(id="r", match=Match(op="attention"), apply={"implementation": "reference", "matmul": BOTH})
    report = precisionpass.explain(attend, tuple(tensors()), rules=[rule], measure=True)
    measured = report.sites[0].measured
    assert 4 * measured["output"]["old_error"] < measured["output"]["new_error"] < 0.1
    gradients = [held for name, held in measured.items() if name.startswith("gradient")]
    assert len(gradients) == 3 and all(held["new_error"] <= held["old_error"] for held in gradients)
