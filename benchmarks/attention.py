"""The attention kernels beside SDPA flash, SDPA cuDNN and FlexAttention, in one run on this GPU.

    python benchmarks/attention.py [--out FOLDER] [--lengths 2048 4096 16384] [--quick]

BF16, 16k tokens, 2048 channels. Hot: no pauses, the candidates of a problem take turns, three rounds of 250 ms each,
medians. TFLOP/s count 4*B*H*S*S*D for a forward, half of it if causal, 2.5 times it for a backward. "plain" is the same
kernel without the method: normaliser of unrounded P, delta of the rounded output, no residual. "hopper" is ours by
the Hopper kernels, "fused" so with deterministic: false. Compare inside one run only: clocks move between runs. Writes
attention.json, and attention.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import Run, draw, in_rotation, machine

sys.path.insert(0, str(Path(__file__).parents[1]))
from precisionpass.kernels import attention
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved

TOKENS, CHANNELS = 16384, 2048
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def tensors(width: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the upstream gradient as a model has them: [B, S, H, W] transposed."""
    heads = CHANNELS // width
    return tuple(
        torch.randn(TOKENS // length, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )


def ours(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, causal: bool, **settings: object) -> tuple[Run, Run]:
    """(forward, backward) of the kernels."""
    settings = {"save_residual": True} | settings
    arguments = AttentionArguments(
        q, k, v, scale=q.shape[3] ** -0.5, causal="top_left" if causal else "none", **settings
    )
    output, residual, lse, _, _ = attention.forward(arguments)
    saved = Saved(output, residual, lse)
    needs = (True, True, True, False, False)
    gradients = Gradients(upstream, None, None, needs)
    return lambda: attention.forward(arguments)[0], lambda: attention.backward(gradients, arguments, saved)[:3]


def differentiated(forward: Run, leaves: tuple[Tensor, ...], upstream: Tensor) -> Run:
    """The backward of an ordinary forward, its graph kept."""
    output = forward()
    return lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, causal: bool, name: str) -> tuple[Run, Run]:
    """(forward, backward) of one backend of scaled_dot_product_attention."""
    leaves = tuple(part.detach().requires_grad_() for part in (q, k, v))

    def forward(parts: tuple[Tensor, ...] = leaves) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(*parts, is_causal=causal)

    return lambda: forward((q, k, v)), differentiated(forward, leaves, upstream)


def flex(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, causal: bool) -> tuple[Run, Run]:
    """(forward, backward) of FlexAttention, compiled for these shapes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    length = q.shape[2]
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    leaves = tuple(part.detach().requires_grad_() for part in (q, k, v))
    return (
        lambda: compiled(q, k, v, block_mask=mask),
        differentiated(lambda: compiled(*leaves, block_mask=mask), leaves, upstream),
    )


def candidates(width: int, length: int, causal: bool, with_flex: bool) -> dict[str, tuple[Run, Run]]:
    """What can run this problem here; what cannot is named and left out."""
    parts = tensors(width, length)
    makers = {
        "ours": lambda: ours(*parts, causal),
        "plain": lambda: ours(*parts, causal, normaliser="float32", delta="output", save_residual=False),
        "hopper": lambda: ours(*parts, causal, implementation="hopper"),
        "fused": lambda: ours(*parts, causal, implementation="hopper", deterministic=False),
        "flash": lambda: sdpa(*parts, causal, "flash"),
        "cuDNN": lambda: sdpa(*parts, causal, "cuDNN"),
    }
    if width not in (64, 128) or torch.cuda.get_device_capability() != (9, 0):
        del makers["hopper"], makers["fused"]
    if with_flex:
        makers["flex"] = lambda: flex(*parts, causal)
    found = {}
    for name, make in makers.items():
        try:
            forward, backward = make()
            forward(), backward()
            torch.cuda.synchronize()
            found[name] = (forward, backward)
        except Exception as fault:  # noqa: BLE001  a competitor that refuses a shape is an answer
            print(f"  {name} cannot: {type(fault).__name__} {str(fault).splitlines()[0][:100]}", flush=True)
    return found


def speeds(widths: list[int], lengths: list[int], flex_lengths: list[int], milliseconds: int) -> list[dict]:
    """One row for each problem and direction, printed as it is measured."""
    rows = []
    for width in widths:
        for length in lengths:
            for causal in (False, True):
                runs = candidates(width, length, causal, length in flex_lengths and width <= 128)
                flops = 4 * TOKENS * length * CHANNELS * (0.5 if causal else 1.0)
                for direction, index in (("forward", 0), ("backward", 1)):
                    times = in_rotation({name: pair[index] for name, pair in runs.items()}, milliseconds)
                    total = flops * (2.5 if index else 1.0)
                    rates = {name: total / value / 1e9 for name, value in times.items()}
                    rows.append({"width": width, "length": length, "causal": causal, "direction": direction} | rates)
                    print(line(rows[-1]), flush=True)
                del runs
    return rows


def line(row: dict) -> str:
    """A row as text: TFLOP/s, and ours relative to each."""
    kind = "causal" if row["causal"] else "full"
    head = f"hd{row['width']:<4} S{row['length']:<6} {kind:<7} {row['direction']:<9}"
    names = [name for name in ("ours", "plain", "hopper", "fused", "flash", "cuDNN", "flex") if name in row]
    cells = [f"ours {row['ours']:4.0f}"]
    cells += [f"{name} {row[name]:4.0f} ({row['ours'] / row[name]:.2f}x)" for name in names[1:]]
    return head + "  ".join(cells)


def masked(width: int, length: int, milliseconds: int) -> list[dict]:
    """Time of the portable kernels with a mask or bias given as a tensor, relative to none."""
    q, k, v, upstream = tensors(width, length)
    batch, heads = q.shape[:2]
    place = torch.arange(length, device="cuda")
    padding = (place < torch.linspace(length / 2, length, batch, device="cuda").long()[:, None])[:, None, None]
    document = (place[None] * torch.arange(5, 5 + batch, device="cuda")[:, None] // length)[:, None]
    terms = {
        "none": {},
        "padding [B,1,1,S]": {"mask": padding},
        "padding [B,1,S,S]": {"mask": padding.expand(batch, 1, length, length).contiguous()},
        "causal and padding [B,1,S,S]": {"mask": padding & (place <= place[:, None])},
        "documents [B,1,S,S]": {"mask": document[..., None] == document[..., None, :]},
        "a tenth at random [B,1,S,S]": {"mask": torch.rand(batch, 1, length, length, device="cuda") > 0.1},
        "bias [1,H,S,S]": {"bias": torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16)},
        "dropout 0.1": {"dropout_p": 0.1, "seed": torch.tensor([1], device="cuda")},
        "softcap 50": {"softcap": 50.0},
        "window 1024": {"window_left": 1023, "window_right": 0},
    }
    pairs = {
        name: ours(q, k, v, upstream, False, implementation="triton", **term) for name, term in terms.items()
    }
    rows = []
    for direction, index in (("forward", 0), ("backward", 1)):
        times = in_rotation({name: pair[index] for name, pair in pairs.items()}, milliseconds)
        rows.append({"width": width, "direction": direction} | {n: t / times["none"] for n, t in times.items()})
        listed = "  ".join(f"{name} {t / times['none']:.2f}x" for name, t in times.items() if name != "none")
        print(f"hd{width} S{length} full {direction}, time relative to no mask: {listed}", flush=True)
    return rows


def errors(width: int, length: int = 4096) -> dict[str, list[float]]:
    """Relative errors of O, dQ, dK, dV against float64 on normal inputs, causal, first head."""
    q, k, v, upstream = tensors(width, length)
    q, k, v, upstream = (part[:1, :2] for part in (q, k, v, upstream))
    wide = [part.double().requires_grad_() for part in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * width**-0.5
    allowed = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
    truth = [scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ wide[2]]
    truth += torch.autograd.grad(truth[0], wide, upstream.double())
    result = {}
    for name in ("ours", "flash", "cuDNN"):
        pair = ours(q, k, v, upstream, True) if name == "ours" else sdpa(q, k, v, upstream, True, name)
        found = [pair[0](), *pair[1]()]
        result[name] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        print(f"hd{width} error of O dQ dK dV, {name}: " + " ".join(f"{e:.2e}" for e in result[name]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--flex-lengths", type=int, nargs="*", default=[4096])
    parser.add_argument("--milliseconds", type=int, default=250)
    parser.add_argument("--quick", action="store_true", help="60 ms a turn: a first look")
    options = parser.parse_args()
    milliseconds = 60 if options.quick else options.milliseconds
    report = machine() | {
        "errors": {width: errors(width) for width in options.widths},
        "speeds": speeds(options.widths, options.lengths, options.flex_lengths, milliseconds),
        "masks": [row for width in options.widths[:2] for row in masked(width, 4096, min(milliseconds, 100))],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.json").write_text(json.dumps(report, indent=1))

    def label(row: dict) -> str:
        return f"hd{row['width']}\n{row['length']}\n{'causal' if row['causal'] else 'full'}"

    draw(report["speeds"], ("ours", "flash", "cuDNN", "flex"), label, "TFLOP/s", options.out / "attention.png")


if __name__ == "__main__":
    main()
