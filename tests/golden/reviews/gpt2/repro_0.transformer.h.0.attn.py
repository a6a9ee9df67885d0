"""attention of transformer.h.0.attn (GPT2Attention), transformers/integrations/sdpa_attention.py:182, rewritten by rule attention-unbiased.

Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.
"""

import torch

import precisionpass.ops
from precisionpass.measure import made_up, show_comparison


def old(key_states_1, value_states_1, query_states_1):
    arange = torch.arange(12, device=torch.device("cpu"))  # int64[12]
    position_ids = arange + 0  # int64[12]
    position_ids_1 = position_ids.unsqueeze(0)  # int64[1, 12]
    position_ids_2 = position_ids_1.expand(2, -1)  # int64[2, 12]
    getitem = position_ids_2[:, :1]  # int64[2, 1]
    first_dummy_value = getitem - 1  # int64[2, 1]
    position_diff = torch.diff(position_ids_2, prepend=first_dummy_value, dim=-1)  # int64[2, 12]
    ne = position_diff != 1  # bool[2, 12]
    packed_sequence_mask = ne.cumsum(-1)  # int64[2, 12]
    expand_1 = position_ids_1.expand(2, -1)  # int64[2, 12]
    batch_arange = torch.arange(2, device=torch.device("cpu"))  # int64[2]
    arange_3 = torch.arange(12, device=torch.device("cpu"))  # int64[12]
    q_arange = arange_3 + 0  # int64[12]
    arange_4 = torch.arange(12, device=torch.device("cpu"))  # int64[12]
    kv_arange = arange_4 + 0  # int64[12]
    batch_indices = batch_arange[:, None, None, None]  # int64[2, 1, 1, 1]
    q_indices = q_arange[None, None, :, None]  # int64[1, 1, 12, 1]
    kv_indices = kv_arange[None, None, None, :]  # int64[1, 1, 1, 12]
    result = q_indices.new_ones((), dtype=torch.bool)  # bool[]
    getitem_5 = expand_1[batch_indices, q_indices]  # int64[2, 1, 12, 1]
    getitem_6 = expand_1[batch_indices, kv_indices]  # int64[2, 1, 1, 12]
    le = getitem_6 <= getitem_5  # bool[2, 1, 12, 12]
    to_1 = le.to(torch.device("cpu"))  # bool[2, 1, 12, 12]
    result_1 = result & to_1  # bool[2, 1, 12, 12]
    getitem_7 = packed_sequence_mask[batch_indices, q_indices]  # int64[2, 1, 12, 1]
    getitem_8 = packed_sequence_mask[batch_indices, kv_indices]  # int64[2, 1, 1, 12]
    eq = getitem_7 == getitem_8  # bool[2, 1, 12, 12]
    to_2 = eq.to(torch.device("cpu"))  # bool[2, 1, 12, 12]
    result_2 = result_1 & to_2  # bool[2, 1, 12, 12]
    attention_mask = result_2.expand(2, -1, 12, 12)  # bool[2, 1, 12, 12]
    attn_output = torch.nn.functional.scaled_dot_product_attention(query_states_1, key_states_1, value_states_1, attn_mask=attention_mask, dropout_p=0, scale=0.25, is_causal=False)  # bf16[2, 4, 12, 16]
    return attn_output


def new(key_states_1, value_states_1, query_states_1):
    attention_default = torch.ops.precisionpass.attention.default(query_states_1, key_states_1, value_states_1, scale=0.25, causal='top_left', save_residual=True)  # (bf16[2, 4, 12, 16], int8[2, 4, 12, 16], 3 more)
    getitem_16 = attention_default[0]  # bf16[2, 4, 12, 16]
    return getitem_16


def inputs():
    return {
        "key_states_1": made_up((2, 4, 12, 16), torch.bfloat16),
        "value_states_1": made_up((2, 4, 12, 16), torch.bfloat16),
        "query_states_1": made_up((2, 4, 12, 16), torch.bfloat16),
    }


if __name__ == "__main__":
    show_comparison(old, new, inputs())
