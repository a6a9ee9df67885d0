"""Random attention, written as source from pieces of the spellings that models use: what fails can be read and kept."""

import math

from hypothesis import strategies as st

from tests.fuzzing.case import Case, Input


class Writer:
    """The choices of one case, the lines so far and the inputs that they read."""

    def __init__(self, draw):
        self.draw, self.lines, self.inputs, self.plain = draw, [], {}, True

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == 1

    def write(self, *lines: str) -> None:
        self.lines += lines

    def fill(self) -> str:
        """What stands for a masked score: what every format that the scores may have can hold."""
        half = any(spec.dtype == "float16" for spec in self.inputs.values())
        return self.pick('float("-inf")', "-1e4", *(["-65504.0"] if half else ["-1e9", "-3.3e38"]))

    def input(self, name: str, shape, dtype: str, kind: str = "normal") -> str:
        name = f"{name}{sum(known.rstrip('0123456789') == name for known in self.inputs) or ''}"
        memory = self.pick("contiguous", "contiguous", "transposed", "sliced")
        self.inputs[name] = Input(tuple(shape), dtype, kind, memory)
        return name


@st.composite
def attention(draw) -> Case:
    """One function of queries, keys and values in two to five dimensions, heads first or last, grouped or not."""
    w = Writer(draw)
    sizes = {"b": w.pick(1, 2, 3), "h": w.pick(1, 2, 4), "i": w.pick(1, 2, 5, 7), "j": w.pick(1, 3, 5, 8)}
    sizes["d"] = w.pick(1, 4, 7, 8)
    sizes["w"] = w.pick(sizes["d"], sizes["d"], 3)
    dtype = w.pick("float32", "float32", "float32", "bfloat16", "float16", "float64")
    layout = w.pick("4d", "4d", "3d", "2d", "heads last", "grouped", "five")
    lead = _operands(w, layout, sizes, dtype)
    if w.chance(6):
        _fused(w, lead, sizes, dtype)
    else:
        _written_out(w, lead, sizes, dtype)
    o = (*lead, sizes["i"], sizes["w"])
    if len(lead) == 2 and w.chance(2):
        w.write(f"o = o.transpose(1, 2).reshape({o[0]}, {o[2]}, {o[1] * o[3]})")
    if w.chance(5):
        w.write("o = o * 2 + 1")
    extra = [name for name in ("s", "p") if w.chance(12) and any(line.startswith(f"{name} ") for line in w.lines)]
    w.write(f"return {', '.join(['o', *extra])}")
    return Case(tuple(w.lines), w.inputs, w.plain and not extra and min(sizes.values()) > 1)


def _operands(w: Writer, layout: str, sizes: dict, dtype: str) -> tuple[int, ...]:
    """Write q, k and v as [*lead, length, width]; the leading dimensions."""
    b, h, i, j, d, width = (sizes[name] for name in "bhijdw")
    wide = "float32" if dtype in ("bfloat16", "float16") and w.chance(8) else dtype
    names = ("q", i, d, dtype), ("k", j, d, dtype), ("v", j, width, wide)
    if layout == "heads last":
        for name, length, last, kind in names:
            w.input(name, (b, length, h, last), kind)
            w.write(f"{name} = {name}.{w.pick('transpose(1, 2)', 'permute(0, 2, 1, 3)')}")
        lead = (b, h)
    elif layout in ("grouped", "five"):
        kv = w.pick(*(n for n in (1, 2, 4) if h % n == 0))
        for name, length, last, kind in names:
            w.input(name, (b, h if name == "q" else kv, length, last), kind)
        lead = _grouped(w, layout, b, h, kv, j, d, width)
        lead = lead if lead else (b, h)
    else:
        lead = {"4d": (b, h), "3d": (b * h,), "2d": ()}[layout]
        for name, length, last, kind in names:
            w.input(name, (*lead, length, last), kind)
    if w.chance(4):
        w.write(f"q = q {w.pick('*', '/')} {w.pick('0.5', '2.0', f'{math.sqrt(d)!r}')}")
    if w.chance(8):
        w.write("k = k * 0.7")
    if w.chance(8) and dtype != "float64":
        w.write("q, k = q.float(), k.float()")
    return lead


def _grouped(w: Writer, layout: str, b: int, h: int, kv: int, j: int, d: int, width: int) -> tuple[int, ...]:
    group = h // kv
    if layout == "five":
        w.write(f"q = q.{w.pick('view', 'reshape')}({b}, {kv}, {group}, -1, {d})" if _contiguous(w, "q") else
                f"q = q.reshape({b}, {kv}, {group}, -1, {d})", "k, v = k[:, :, None], v[:, :, None]")  # fmt: skip
        return b, kv, group
    for name, last in (("k", d), ("v", width)):
        if w.pick(True, False):
            w.write(f"{name} = {name}.repeat_interleave({group}, {w.pick('dim=1', '1')})")
        else:
            w.write(
                f"{name} = {name}[:, :, None].expand({b}, {kv}, {group}, {j}, {last}).reshape({b}, {h}, {j}, {last})"
            )
    return b, h


def _contiguous(w: Writer, name: str) -> bool:
    return w.inputs[name].memory == "contiguous"


def _fused(w: Writer, lead: tuple[int, ...], sizes: dict, dtype: str) -> None:
    arguments = ["q.to(v.dtype)", "k.to(v.dtype)", "v"]
    if len(lead) == 3:
        w.write(f"k, v = (t.expand({lead[0]}, {lead[1]}, {lead[2]}, -1, -1) for t in (k, v))")
    kind = w.pick("none", "bool", "float", "causal")
    if kind == "bool":
        arguments.append(w.input("mask", _broadcast(w, (*lead, sizes["i"], sizes["j"]), least=2), "bool", "mask"))
    elif kind == "float":
        wide = "float32" if w.lines and any("float()" in line for line in w.lines) else w.inputs["v"].dtype
        name = w.input("bias", _broadcast(w, (*lead, sizes["i"], sizes["j"]), least=2), wide)
        arguments.append(f"{name}.to(v.dtype)")
    elif kind == "causal":
        arguments.append("is_causal=True")
    if w.chance(3):
        arguments.append("scale=0.3")
    w.write(f"o = F.scaled_dot_product_attention({', '.join(arguments)})")


def _written_out(w: Writer, lead: tuple[int, ...], sizes: dict, dtype: str) -> None:
    scores = (*lead, sizes["i"], sizes["j"])
    products = ["q @ k.mT", "torch.matmul(q, k.transpose(-1, -2))", "torch.einsum('...id,...jd->...ij', q, k)",
                "(k @ q.mT).mT", "(q[..., :, None, :] * k[..., None, :, :]).sum(-1)"]  # fmt: skip
    if len(lead) == 1:
        products += ["torch.bmm(q, k.mT)"]
    w.write(f"s = {w.pick(*products)}")
    masks: list[tuple[str, str]] = []
    for _ in range(w.pick(0, 1, 1, 2, 3, 4)):
        w.write(*_score_step(w, scores, masks))
    _softmax(w, scores, masks)
    _probabilities(w, lead, masks)
    w.write(w.pick("v = v.to(p.dtype)", "p = p.to(v.dtype)", "p = p.type_as(v)", "p, v = p.float(), v.float()"))
    values = ["p @ v", "torch.matmul(p, v)", "torch.einsum('...ij,...jd->...id', p, v)", "(v.mT @ p.mT).mT",
              "(p[..., None] * v[..., None, :, :]).sum(-2)"]  # fmt: skip
    w.write(f"o = {w.pick(*values)}")


def _broadcast(w: Writer, shape: tuple[int, ...], least: int = 1) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: leading dimensions dropped, others of size one."""
    kept = shape[w.draw(st.integers(0, len(shape) - least)) :]
    return tuple(size if w.chance(2) else 1 for size in kept)


def _score_step(w: Writer, scores: tuple[int, ...], masks: list) -> list[str]:
    step = w.pick(*("scale", "bias", "mask") * 2, "causal", "cap", "clamp", "negative", "head", "float", "view",
                  "shift", "constant")  # fmt: skip
    i, j = scores[-2:]
    if step == "scale":
        number = w.pick("0.5", "0.125", "1.7", "-0.5")
        return [
            w.pick(
                f"s = s * {number}", f"s = s / {number}", f"s *= {number}", f"s = {number} * s", f"s = s.div({number})"
            )
        ]
    if step == "bias":
        name = w.input("bias", _broadcast(w, scores), w.pick("float32", w.inputs["q"].dtype))
        return [w.pick(f"s = s + {name}", f"s = {name} + s", f"s = s - {name}", f"s = s.add({name}, alpha=0.5)")]
    if step == "mask":
        name, fill = w.input("mask", _broadcast(w, scores), "bool", "mask"), w.fill()
        masks.append((name, fill))
        return [w.pick(f"s = s.masked_fill(~{name}, {fill})", f"s = s.clone().masked_fill_(~{name}, {fill})",
                       f"s = torch.where({name}, s, {fill})", f"s = s + (1.0 - {name}.to(s.dtype)) * -1e4",
                       f"s = torch.where(~{name}, torch.full_like(s, {fill}), s)")]  # fmt: skip
    if step == "causal":
        ones, fill = f"torch.ones({i}, {j}, dtype=torch.bool)", w.fill()
        ahead = f"torch.arange({j})[None, :] > torch.arange({i})[:, None] + {max(j - i, 0)}"
        return [w.pick(f"s = s.masked_fill({ones}.triu(1), {fill})", f"s = torch.where({ones}.tril(), s, {fill})",
                       f"s = s + torch.full(({i}, {j}), {fill}).triu(1)",
                       f"s = s.masked_fill({ahead}, {fill})")]  # fmt: skip
    filled = any(fill in line for fill in ("-1e9", "-3.3e38") for line in w.lines)
    if step == "head" and len(scores) == 4 and not filled:  # its gradient multiplies roundings with the fill
        return [f"s = s * {w.input('heat', (scores[1], 1, 1), w.inputs['q'].dtype)}"]
    if step == "view" and len(scores) == 4:
        return [f"s = s.reshape({scores[0] * scores[1]}, {i}, {j})", f"s = s.view({scores[0]}, {scores[1]}, {i}, {j})"]
    return {
        "cap": ["s = 5.0 * torch.tanh(s / 5.0)"],
        "clamp": [w.pick("s = s.clamp(-3, 3)", "s = s.clamp(max=4.0)", "s = torch.clamp(s, min=-4.0)")],
        "negative": ["s = -s"],
        "float": [w.pick("s = s.float()", "s = s.to(torch.float32)")],
        "shift": [w.pick("s = s - s.amax(-1, keepdim=True)", "s = s - s.max(-1, keepdim=True)[0]")],
        "constant": [w.pick("s = s + 1.5", "s = s - 0.5", "s = 2.0 - s")],
    }.get(step, ["s = s * 0.25"])


def _softmax(w: Writer, scores: tuple[int, ...], masks: list) -> None:
    # in float64 as well the logarithm of a sum vanishes beside a fill of -3.3e38
    by_logarithm = [] if any("-3.3e38" in line for line in w.lines) else ["log", "logsumexp"]
    spelling = w.pick("method", "method", "function", "float", "exp", "stable", "rows", "sink", "off by one", "vector",
                      "masked", *by_logarithm)  # fmt: skip
    if spelling == "sink":
        _sink(w, w.input("sink", (*scores[:-2], 1, 1), w.inputs["q"].dtype), scores)
        return
    if spelling == "masked":
        name = w.input("mask", _broadcast(w, scores), "bool", "mask")
        masks.append((name, 'float("-inf")'))
        w.write(
            "e = s.exp()", w.pick(f"e = e * {name}", f"e = e.masked_fill(~{name}, 0)", f"e = {name}.to(e.dtype) * e")
        )
    if spelling == "rows":
        w.plain = False  # over another axis than the keys
    w.write(*{
        "method": ["p = s.softmax(-1)"],
        "function": ["p = torch.softmax(s, dim=-1)"],
        "float": ["p = F.softmax(s, dim=-1, dtype=torch.float32)"],
        "exp": ["e = s.exp()", "p = e / e.sum(-1, keepdim=True)"],
        "stable": ["e = torch.exp(s - s.amax(dim=-1, keepdim=True))", "p = e / e.sum(dim=-1, keepdim=True)"],
        "log": ["p = s.log_softmax(-1).exp()"],
        "logsumexp": ["p = (s - torch.logsumexp(s, -1, keepdim=True)).exp()"],
        "rows": ["p = s.softmax(-2)"],
        "off by one": [
            "e = s.exp()", w.pick("p = e / (1 + e.sum(-1, keepdim=True))", "p = e / (e.sum(-1)[..., None] + 1)"),
        ],
        "vector": ["e = torch.exp(s - s.amax(-1)[..., None])", "p = e / e.sum(-1).unsqueeze(-1)"],
        "masked": ["p = e / e.sum(-1, keepdim=True)"],
    }[spelling])  # fmt: skip


def _sink(w: Writer, name: str, scores: tuple[int, ...]) -> None:
    """A softmax that sees one more logit, or the same three times."""
    column = f"{name}.expand({', '.join(map(str, scores[:-1]))}, 1).to(s.dtype)"
    w.write(*w.pick(
        [f"s = torch.cat([s, {column}], -1)", "p = s.softmax(-1)[..., :-1]"],
        [f"s = torch.cat([{column}, s], -1)", "p = s.softmax(-1)[..., 1:]"],
        [f"s = torch.cat([s, {column}.repeat_interleave(3, -1)], -1)", f"p = s.softmax(-1)[..., :{scores[-1]}]"],
        ["s = F.pad(s, (0, 1), value=0.5)", f"p = s.softmax(-1)[..., :{scores[-1]}]"],
        ["m = s.amax(-1, keepdim=True)", "e = torch.exp(s - m)",
         f"p = e / (torch.exp({name}.to(s.dtype) - m) + e.sum(-1, keepdim=True))"],
        ["s = s.clamp(min=-1e4)",
         f"p = torch.exp(s - torch.logaddexp(s.logsumexp(-1, keepdim=True), {name}.to(s.dtype)))"],
    ))  # fmt: skip


def _probabilities(w: Writer, lead: tuple[int, ...], masks: list) -> None:
    step = w.pick("none", "none", "none", "dropout", "heads", "zero", "mixed", "shifted", "renormalised", "nan")
    if step == "nan":
        w.plain = w.plain and not any(".exp()" in line or "exp(" in line for line in w.lines)
        w.write(w.pick("p = p.nan_to_num(0.0)", "p = torch.nan_to_num(p)"))
    elif step == "dropout":
        w.write(w.pick("p = F.dropout(p, 0.0)", "p = F.dropout(p, 0.5, training=False)"))
    elif step == "heads" and len(lead) == 2:
        w.write(f"p = p * {w.input('kept', (lead[1], 1, 1), w.inputs['q'].dtype)}")
    elif step == "zero" and masks:
        name, _ = w.pick(*masks)
        w.plain = False  # an attention only where the fill stands for -inf
        w.write(w.pick(f"p = p.masked_fill(~{name}, 0)", f"p = torch.where({name}, p, 0.0)", f"p = p * {name}"))
    elif step == "mixed" and len(lead) == 2:
        w.plain = False
        w.write(f"p = torch.einsum('bhij,hg->bgij', p, {w.input('mix', (lead[1], lead[1]), 'float32')}.to(p.dtype))")
    elif step == "shifted":
        w.plain = False
        w.write("p = p + 0.01")
    elif step == "renormalised":
        w.plain = False
        w.write("p = p / (p.sum(-1, keepdim=True) + 1e-3)")
