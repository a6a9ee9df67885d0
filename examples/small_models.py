"""GPT-2 and Llama of about 10 M parameters, random weights, and real text to train them on; nothing is downloaded."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor

transformers.logging.set_verbosity_error()

LENGTH = 128  # tokens of a sequence: bytes


def gpt2(
    seed: int = 0, layers: int = 3, width: int = 512, length: int = LENGTH, **more
) -> transformers.GPT2LMHeadModel:
    """FP32, in training mode, without dropout; 9.7 M parameters, heads of 64."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning about the default splits the captured graph in two
    return model.train()


def llama(seed: int = 0, layers: int = 3, width: int = 512, **more) -> transformers.LlamaForCausalLM:
    """FP32, in training mode; 9.9 M parameters, heads of 64, 4 query heads share a key head."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 13 // 4, num_hidden_layers=layers, use_cache=False,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, max_position_embeddings=LENGTH, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def corpus(size: int = 2_000_000) -> Tensor:
    """The first bytes of the Python standard library's own sources, [size] int64."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def batches(text: Tensor, sequences: int, seed: int = 0) -> Iterator[Tensor]:
    """Endless random pieces of the text, [sequences, LENGTH] int64; the same seed gives the same pieces."""
    source = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - LENGTH, (sequences, 1), generator=source)
        yield text[starts + torch.arange(LENGTH)]


def speed_up_bf16() -> bool:
    """On a CPU without BF16 instructions, compute BF16 matrix products in FP32 and round once: ten times as fast.

    That is what tensor cores do: exact products, FP32 sums, one rounding. It holds for the whole process and for every
    model in it, rewritten or not. Returns whether anything was done.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel of its own is replaced
        for name in ("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "baddbmm", "baddbmm.out"):
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            _LIBRARY.impl(name, partial(_through_fp32, kernel), "CPU", with_keyset=True)
    return True


_LIBRARY = torch.library.Library("aten", "IMPL")  # what is registered lasts as long as this object


def _through_fp32(kernel, keys, *tensors: Tensor, out: Tensor | None = None, **factors) -> Tensor:
    """A matrix product by PyTorch's own kernel; of BF16 tensors in FP32, rounded once."""
    if tensors[0].dtype != torch.bfloat16:
        return kernel.call_boxed(keys, *tensors, **factors, **({} if out is None else {"out": out}))
    wide = [tensor.float() for tensor in tensors]
    if out is None:
        return kernel.call_boxed(keys, *wide, **factors).bfloat16()
    return out.copy_(kernel.call_boxed(keys, *wide, **factors, out=torch.empty_like(out, dtype=torch.float32)))
