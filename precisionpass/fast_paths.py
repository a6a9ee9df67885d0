"""Where PyTorch's own transformer layers choose a faster way, written out, so that they are captured and looked into.

`torch.nn.TransformerEncoderLayer` and `MultiheadAttention` call the fused calls in inference instead of their parts.
The masks are what the fused calls make of them: whatever is not zero is masked.
"""

import torch
import torch.nn.functional as F


def encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2,
    mask=None, mask_type=None,
):  # fmt: skip
    """torch._transformer_encoder_layer_fwd: src [B, L, E] -> [B, L, E]."""

    def attend(x):
        parts = (x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(*parts, mask, False, True, mask_type)[0]

    def feed(x):
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))


def multi_head_attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None,
    need_weights=True, average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """torch._native_multi_head_attention: query, key, value [B, L, E] -> ([B, L, E], weights or None)."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    scores = q @ k.transpose(-2, -1) / (embed_dim // num_head) ** 0.5
    if mask is not None:
        masked = mask.to(torch.bool)
        if mask_type == 1:
            masked = masked[:, None, None, :]
        scores = scores.masked_fill(masked, float("-inf"))
    probabilities = scores.softmax(-1)
    output = F.linear((probabilities @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return output, None
    return output, probabilities.mean(1) if average_attn_weights else probabilities


def is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """torch.nn's transformers look at a mask's values, where the graph would break, and drop a causal one for a flag.

    Told that it is not causal they use the mask as it is, which gives the same.
    """
    return is_causal is True
