"""attention of the model itself (NearMisses), tests/review/near_misses.py:57, rewritten by rule attention-unbiased.

Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.
"""

import torch

import precisionpass.ops
from precisionpass.measure import made_up, show_comparison


def old(q_4, k_4, v_4):
    scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention(q_4, k_4, v_4)  # bf16[2, 8, 32]
    return scaled_dot_product_attention


def new(q_4, k_4, v_4):
    unsqueeze = q_4.unsqueeze(0)  # bf16[1, 2, 8, 32]
    unsqueeze_1 = k_4.unsqueeze(0)  # bf16[1, 2, 8, 32]
    unsqueeze_2 = v_4.unsqueeze(0)  # bf16[1, 2, 8, 32]
    attention_default = torch.ops.precisionpass.attention.default(unsqueeze, unsqueeze_1, unsqueeze_2, scale=0.17677669529663687, save_residual=True)  # (bf16[1, 2, 8, 32], int8[1, 2, 8, 32], 3 more)
    getitem_15 = attention_default[0]  # bf16[1, 2, 8, 32]
    squeeze = getitem_15.squeeze(0)  # bf16[2, 8, 32]
    contiguous = squeeze.contiguous()  # bf16[2, 8, 32]
    return contiguous


def inputs():
    return {
        "q_4": made_up((2, 8, 32), torch.bfloat16),
        "k_4": made_up((2, 8, 32), torch.bfloat16),
        "v_4": made_up((2, 8, 32), torch.bfloat16),
    }


if __name__ == "__main__":
    show_comparison(old, new, inputs())
