"""What benchmarks/coverage.py compares with: attention and norms counted while a model runs, without any graph."""

import pytest
import torch

from benchmarks.counting import Counting
from tests.small_models import family

TRUE = {
    "gpt2": {"attention": 2, "layer_norm": 5},
    "llama": {"attention": 2, "rms_norm": 5},
    "bert": {"attention": 2, "layer_norm": 5},
    "t5": {"attention": 6, "rms_norm": 12},
    "vit": {"attention": 2, "layer_norm": 5},
}


@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_two_layers_of_each_family(name, attention):
    torch.manual_seed(0)
    model, inputs = family(name, attention)
    with torch.no_grad(), Counting(model.eval()) as counting:
        model(**inputs)
    assert dict(counting.counts) == TRUE[name]


def test_what_is_no_attention():
    """A gate over experts, powers by a tensor, a softmax of scores that meets no values, mixed probabilities."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.mix = torch.nn.Linear(8, 4), torch.nn.Linear(3, 3, bias=False)

        def forward(self, x, experts):
            chosen = self.gate(x).softmax(-1) @ experts ** torch.ones(8)
            weights = (x @ x.mT).softmax(-1)
            return chosen, weights, self.mix(weights.permute(1, 2, 0))

    model = Model()
    with Counting(model) as counting:
        model(torch.randn(3, 5, 8), torch.randn(3, 4, 8))
    assert dict(counting.counts) == {}
