"""attention of decoder.block.0.layer.1.EncDecAttention (T5Attention), transformers/models/t5/modeling_t5.py:168, rewritten by rule attention-unbiased.

Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.
"""

import torch

import precisionpass.ops
from precisionpass.measure import made_up, show_comparison


def old(query_states_3, key_states_3, value_states_3, position_bias):
    transpose_18 = key_states_3.transpose(2, 3)  # bf16[2, 4, 16, 12]
    matmul_6 = torch.matmul(query_states_3, transpose_18)  # bf16[2, 4, 10, 12]
    attn_weights_13 = matmul_6 * 1.0  # bf16[2, 4, 10, 12]
    attn_weights_14 = attn_weights_13 + position_bias  # bf16[2, 4, 10, 12]
    attn_weights_15 = torch.nn.functional.softmax(attn_weights_14, dim=-1)  # bf16[2, 4, 10, 12]
    attn_weights_16 = torch.nn.functional.dropout(attn_weights_15, p=0.0, training=True)  # bf16[2, 4, 10, 12]
    attn_output_12 = torch.matmul(attn_weights_16, value_states_3)  # bf16[2, 4, 10, 16]
    return attn_output_12


def new(query_states_3, key_states_3, value_states_3, position_bias):
    squeeze_3 = position_bias.squeeze(0)  # bf16[4, 10, 12]
    unsqueeze_5 = squeeze_3.unsqueeze(0)  # bf16[1, 4, 10, 12]
    attention_default_3 = torch.ops.precisionpass.attention.default(query_states_3, key_states_3, value_states_3, scale=1.0, bias=unsqueeze_5, dead_rows='nan', save_residual=True)  # (bf16[2, 4, 10, 16], int8[2, 4, 10, 16], 3 more)
    getitem_11 = attention_default_3[0]  # bf16[2, 4, 10, 16]
    return getitem_11


def inputs():
    return {
        "query_states_3": made_up((2, 4, 10, 16), torch.bfloat16),
        "key_states_3": made_up((2, 4, 12, 16), torch.bfloat16),
        "value_states_3": made_up((2, 4, 12, 16), torch.bfloat16),
        "position_bias": made_up((1, 4, 10, 12), torch.bfloat16),
    }


if __name__ == "__main__":
    show_comparison(old, new, inputs())
