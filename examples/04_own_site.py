"""A kind of site and an op of one's own: squared ReLU, which squares BF16 numbers, computed in FP32 and rounded once.

python examples/04_own_site.py
"""

import torch

import precisionpass
from precisionpass import Found, Match, Recogniser, Rule

aten = torch.ops.aten


def find(search):
    """relu(x) ** 2 in the graph of ATen calls; everything from x to the square is the site."""
    for node in search.nodes:
        squares = node.target is aten.square.default or (node.target is aten.pow.Tensor_Scalar and node.args[1] == 2)
        if squares and node.args[0].target is aten.relu.default:
            yield Found(inputs=(node.args[0].args[0],), output=node, formula="relu(x)^2")


@torch.library.custom_op("example::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.float().relu().square().to(x.dtype)


@squared_relu.register_fake
def _(x):
    return torch.empty_like(x)


def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return (gradient.float() * 2 * x.float().relu()).to(x.dtype)


squared_relu.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

parts = {
    "rules": [Rule(id="mlp", match=Match(op="own.squared_relu"), apply={"implementation": "own.one_rounding"})],
    "sites": [*precisionpass.default_sites, Recogniser("own.squared_relu", find)],
    "actions": {"own.one_rounding": squared_relu},
}


class SquaredReLU(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2


torch.manual_seed(0)
mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), SquaredReLU(), torch.nn.Linear(256, 64)).bfloat16()
x = torch.randn(8, 64, dtype=torch.bfloat16)
print(report := precisionpass.explain(mlp, (x,), **parts))
assert [(site.kind, site.decision) for site in report.sites] == [("own.squared_relu", "rewritten")]
compiled = precisionpass.compile(mlp, backend="aot_eager", **parts)
compiled(x).sum().backward()
print("norm of a gradient:", mlp[0].weight.grad.norm().item())
