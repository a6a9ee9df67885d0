"""attention of encoder.block.0.layer.0.SelfAttention (T5Attention), transformers/models/t5/modeling_t5.py:168, rewritten by rule attention-unbiased.

Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.
"""

import torch

import precisionpass.ops
from precisionpass.measure import made_up, show_comparison


def old(query_states, key_states, value_states, values_1):
    transpose_3 = key_states.transpose(2, 3)  # bf16[2, 4, 16, 12]
    matmul = torch.matmul(query_states, transpose_3)  # bf16[2, 4, 12, 12]
    attn_weights = matmul * 1.0  # bf16[2, 4, 12, 12]
    attn_weights_1 = attn_weights + values_1  # bf16[2, 4, 12, 12]
    attn_weights_2 = torch.nn.functional.softmax(attn_weights_1, dim=-1)  # bf16[2, 4, 12, 12]
    attn_weights_3 = torch.nn.functional.dropout(attn_weights_2, p=0.0, training=True)  # bf16[2, 4, 12, 12]
    attn_output = torch.matmul(attn_weights_3, value_states)  # bf16[2, 4, 12, 16]
    return attn_output


def new(query_states, key_states, value_states, values_1):
    squeeze = values_1.squeeze(0)  # bf16[4, 12, 12]
    unsqueeze_2 = squeeze.unsqueeze(0)  # bf16[1, 4, 12, 12]
    attention_default = torch.ops.precisionpass.attention.default(query_states, key_states, value_states, scale=1.0, bias=unsqueeze_2, dead_rows='nan', save_residual=True)  # (bf16[2, 4, 12, 16], int8[2, 4, 12, 16], 3 more)
    getitem_8 = attention_default[0]  # bf16[2, 4, 12, 16]
    return getitem_8


def inputs():
    return {
        "query_states": made_up((2, 4, 12, 16), torch.bfloat16),
        "key_states": made_up((2, 4, 12, 16), torch.bfloat16),
        "value_states": made_up((2, 4, 12, 16), torch.bfloat16),
        "values_1": made_up((1, 4, 12, 12), torch.bfloat16),
    }


if __name__ == "__main__":
    show_comparison(old, new, inputs())
