"""PyTorch's fused inference calls: a graph of nothing else is looked into, and gives what they give."""

import torch

import precisionpass
from tests.agreement import against_eager, counts


def test_an_encoder_with_padding_in_inference():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        torch._dynamo.reset()
        compiled = precisionpass.compile(model, backend="aot_eager")
        found = compiled(x, src_key_padding_mask=padding)
    report = precisionpass.report(compiled)
    assert counts(report) == {"attention": 2}
    assert counts(report, "kept") == {"layer_norm": 4}
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_decoder_asks_nothing_of_its_masks_values():
    """nn.TransformerDecoder looks whether a mask is causal, which broke the graph and hid every layer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerDecoder(layer, 2)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
    inputs = {"tgt": torch.randn(2, 7, 16), "memory": torch.randn(2, 5, 16), "tgt_mask": causal}
    against_eager(model, (), inputs, rewritten={"attention": 4})
    against_eager(model.eval(), (), inputs, training=False, rewritten={"attention": 4})
