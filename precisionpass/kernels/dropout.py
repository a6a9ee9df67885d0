"""Dropout of P: the same Philox stream in forward and backward, whatever the tile size or the orientation."""

import triton
import triton.language as tl


@triton.jit
def keep(seed, batch_head, query_index, key_index, query_count, key_count, probability):
    """True where P[b, h, i, j] is kept: tl.rand(seed, ((b*H + h)*Sq + i)*Sk + j) >= probability.

    The offset has 64 bits; tl.rand puts its halves into the two counters, so that no two positions share a number.
    """
    row = batch_head.to(tl.int64) * query_count + query_index.to(tl.int64)
    return tl.rand(seed, row * key_count + key_index.to(tl.int64)) >= probability


@triton.jit
def keep_scale(probability):
    """What a kept P is multiplied by: 1 / (1 - p), 0 where p is 1."""
    return tl.where(probability < 1.0, 1.0 / (1.0 - probability), 0.0)
