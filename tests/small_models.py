"""Small models for whole-pipeline tests: five Hugging Face families of random weights, and attention written out."""

import math

import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

transformers.logging.set_verbosity_error()

VOCABULARY = 97
FAMILIES = ("gpt2", "llama", "bert", "t5", "vit")


def family(name: str, attention: str = "sdpa", layers: int = 2, width: int = 64) -> tuple[nn.Module, dict]:
    """A model of this family without dropout, and keyword arguments for it, drawn from the global generator."""
    common = {"attn_implementation": attention}
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            n_positions=64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **common,
        )
        return GPT2LMHeadModel(config), {"input_ids": tokens()}
    if name == "llama":
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            **common,
        )
        return LlamaForCausalLM(config), {"input_ids": tokens()}
    if name == "bert":
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            **common,
        )
        padding = torch.ones(2, 12, dtype=torch.long)
        padding[0, 9:] = 0
        return BertModel(config), {"input_ids": tokens(), "attention_mask": padding}
    if name == "t5":
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_ff=96,
            d_kv=16,
            num_layers=layers,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            **common,
        )
        return T5ForConditionalGeneration(config), {"input_ids": tokens(), "decoder_input_ids": tokens(length=10)}
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **common,
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


class Attention(nn.Module):
    """Self-attention written out: x [B, S, width] -> [B, S, width], causal, with dropout on the probabilities."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Norm, attention, and a residual connection."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Stack(nn.Sequential):
    """Several blocks."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, dropout: float = 0.0):
        super().__init__(*(Block(width, heads, dropout) for _ in range(layers)))
