"""attention of decoder.block.0.layer.0.SelfAttention (T5Attention), transformers/models/t5/modeling_t5.py:168, rewritten by rule attention-unbiased.

Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.
"""

import torch

import precisionpass.ops
from precisionpass.measure import made_up, show_comparison


def old(query_states_2, key_states_2, value_states_2, values_3):
    arange_4 = torch.arange(10, device=torch.device("cpu"))  # int64[10]
    q_arange = arange_4 + 0  # int64[10]
    arange_5 = torch.arange(10, device=torch.device("cpu"))  # int64[10]
    kv_arange = arange_5 + 0  # int64[10]
    q_indices = q_arange[None, None, :, None]  # int64[1, 1, 10, 1]
    kv_indices = kv_arange[None, None, None, :]  # int64[1, 1, 1, 10]
    attention_mask = kv_indices <= q_indices  # bool[1, 1, 10, 10]
    attention_mask_1 = attention_mask.expand(2, -1, 10, 10)  # bool[2, 1, 10, 10]
    zeros = torch.zeros((), device=torch.device("cpu"), dtype=torch.bfloat16)  # bf16[]
    mask = torch.where(attention_mask_1, zeros, -3.3895313892515355e+38)  # bf16[2, 1, 10, 10]
    transpose_13 = key_states_2.transpose(2, 3)  # bf16[2, 4, 16, 10]
    matmul_4 = torch.matmul(query_states_2, transpose_13)  # bf16[2, 4, 10, 10]
    attn_weights_8 = matmul_4 * 1.0  # bf16[2, 4, 10, 10]
    attn_weights_9 = attn_weights_8 + values_3  # bf16[2, 4, 10, 10]
    attn_weights_10 = attn_weights_9 + mask  # bf16[2, 4, 10, 10]
    attn_weights_11 = torch.nn.functional.softmax(attn_weights_10, dim=-1)  # bf16[2, 4, 10, 10]
    attn_weights_12 = torch.nn.functional.dropout(attn_weights_11, p=0.0, training=True)  # bf16[2, 4, 10, 10]
    attn_output_8 = torch.matmul(attn_weights_12, value_states_2)  # bf16[2, 4, 10, 16]
    return attn_output_8


def new(query_states_2, key_states_2, value_states_2, values_3):
    squeeze_2 = values_3.squeeze(0)  # bf16[4, 10, 10]
    unsqueeze_4 = squeeze_2.unsqueeze(0)  # bf16[1, 4, 10, 10]
    attention_default_2 = torch.ops.precisionpass.attention.default(query_states_2, key_states_2, value_states_2, scale=1.0, bias=unsqueeze_4, dead_rows='nan', causal='top_left', save_residual=True)  # (bf16[2, 4, 10, 16], int8[2, 4, 10, 16], 3 more)
    getitem_10 = attention_default_2[0]  # bf16[2, 4, 10, 16]
    return getitem_10


def inputs():
    return {
        "query_states_2": made_up((2, 4, 10, 16), torch.bfloat16),
        "key_states_2": made_up((2, 4, 10, 16), torch.bfloat16),
        "value_states_2": made_up((2, 4, 10, 16), torch.bfloat16),
        "values_3": made_up((1, 4, 10, 10), torch.bfloat16),
    }


if __name__ == "__main__":
    show_comparison(old, new, inputs())
