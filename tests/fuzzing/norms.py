"""Random LayerNorms and RMSNorms, written as source from pieces of the spellings that models use."""

import math

from hypothesis import strategies as st

from tests.fuzzing.attention import Writer
from tests.fuzzing.case import Case


@st.composite
def norms(draw) -> Case:
    """One function of a tensor: a norm over its last dimension, its last two or its channels, called or written out."""
    w = Writer(draw)
    rank = w.pick(2, 3, 3, 4)
    shape = (w.pick(1, 2, 3), *(w.pick(1, 5, 8) for _ in range(rank - 2)), w.pick(7, 8, 16))
    dtype = w.pick("float32", "float32", "bfloat16", "float16", "float64")
    w.input("x", shape, dtype)
    dims = w.pick((rank - 1,), (rank - 1,), (rank - 1,), (rank - 2, rank - 1), (1,))
    row = tuple(shape[d] for d in dims)
    rms, eps = w.pick(True, False), w.pick("1e-5", "1e-6", "1e-3")
    last = dims[-1] == rank - 1
    if last and w.chance(4):
        _called(w, rms, row, eps, dtype)
    else:
        _written_out(w, rms, shape, dims, row, eps, dtype)
    if w.chance(4):
        w.write("y = y * 2 + 1")
    w.write("return y")
    return Case(tuple(w.lines), w.inputs, w.plain and math.prod(row) > 1 and (last or len(dims) == 1))


def _called(w: Writer, rms: bool, row, eps: str, dtype: str) -> None:
    weight = w.input("weight", row, dtype) if w.chance(2) else "None"
    if rms:
        w.write(f"y = F.rms_norm(x, {row}, {weight}, {w.pick(eps, 'None')})")
    else:
        bias = w.input("bias", row, dtype) if w.chance(2) else "None"
        w.write(f"y = F.layer_norm(x, {row}, {weight}, {bias}, {eps})")


def _written_out(w: Writer, rms: bool, shape, dims, row, eps: str, dtype: str) -> None:
    over = f"{dims}" if len(dims) > 1 else w.pick(f"{dims[0]}", f"({dims[0] - len(shape)},)")
    wide, count = w.chance(2) and dtype != "float64", math.prod(row)
    w.write(w.pick("h = x.float()", "h = x.to(torch.float32)") if wide else "h = x")
    if rms:
        w.write("c = h")
        square = w.pick("c.pow(2)", "c * c", "c ** 2", "torch.square(c)")
        spellings = [f"v = ({square}).mean({over}, keepdim=True)"] * 2
        spellings += [f"v = ({square}).sum({over}, keepdim=True) {w.pick(f'/ {count}', f'* {1 / count!r}')}"]
        if len(dims) == 1:
            spellings += [f"v = ({square}).mean({over}).unsqueeze({dims[0]})",
                          f"v = c.norm(dim={over}, keepdim=True) ** 2 / {count}"]  # fmt: skip
        w.write(w.pick(*spellings))
    else:
        w.write(f"m = h.mean({over}, keepdim=True)", "c = h - m")
        unbiased = w.chance(8)
        w.plain = w.plain and not unbiased
        spellings = [f"v = h.var({over}, keepdim=True, unbiased={unbiased})"]
        if not unbiased:
            spellings += [f"v = (c * c).mean({over}, keepdim=True)", f"v = c.pow(2).mean({over}, keepdim=True)"]
            if dtype in ("float32", "float64"):
                spellings.append(f"v = (h * h).mean({over}, keepdim=True) - m * m")
        w.write(w.pick(*spellings))
    root = w.pick("inside", "inside", "inside", "outside", "deviation", "weighted")
    if root == "deviation" and not rms:
        w.write(f"y = c / h.std({over}, keepdim=True, correction=0)")
    elif root == "weighted" and dims[-1] == len(shape) - 1:
        w.write(f"y = c * (torch.rsqrt(v + {eps}) * {w.input('inner', row, dtype)})")
    elif root == "outside":
        w.plain = False
        w.write(f"y = c / (v.sqrt() + {eps})")
    else:
        w.write(w.pick(f"y = c * torch.rsqrt(v + {eps})", f"y = c / torch.sqrt(v + {eps})",
                       f"y = c * (v + {eps}) ** -0.5", f"y = c * (1 / torch.sqrt(v + {eps}))",
                       f"y = torch.rsqrt(v + {eps}) * c", f"y = c * (v + {eps}).sqrt().reciprocal()"))  # fmt: skip
    if wide and w.chance(2):
        w.write("y = y.to(x.dtype)")
    weighted = row if dims[-1] == len(shape) - 1 else (shape[1], *(1,) * (len(shape) - 2))
    if w.chance(2):
        name = w.input("weight", weighted, w.pick("float32", dtype))
        w.write(
            w.pick(f"y = y * {name}", f"y = {name} * y", f"y = y * (1 + {name})", f"y = y * (1.0 + {name}.float())")
        )
    if w.chance(3):
        w.write(f"y = y + {w.input('bias', weighted, w.pick('float32', dtype))}")
    if wide and w.chance(2):
        w.write(w.pick("y = y.to(x.dtype)", "y = y.type_as(x)"))
    if w.chance(8):
        w.write("y = torch.cat([y, v.expand_as(y).to(y.dtype)], -1)")  # the statistics are used elsewhere too
