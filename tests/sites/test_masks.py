"""A mask read off the graph as a relation is that mask, element for element; what cannot be told stays a tensor."""

import pytest
import torch

from precisionpass.shadow import make_shadow
from precisionpass.sites.masks import pattern_of

ROWS, KEYS = 6, 9


def i():
    return torch.arange(ROWS)[:, None]


def j():
    return torch.arange(KEYS)


def same_sequence(positions):
    """Keys of the query's own sequence, where a position that does not follow the one before begins a new one."""
    number = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return number[0, i()] == number[0, j()[None, :]]


TOLD = {
    "causal": lambda x: j() <= i(),
    "strict": lambda x: i() > j(),
    "from the end": lambda x: j() <= i() + (KEYS - ROWS),
    "window": lambda x: (j() <= i()) & (i() - j() < 3),
    "window by and": lambda x: torch.logical_and(i() >= j(), j() > i() - 4),
    "negated": lambda x: ~(j() > i()),
    "tril": lambda x: torch.ones(ROWS, KEYS).tril(2),
    "triu of -inf": lambda x: torch.full((ROWS, KEYS), float("-inf")).triu(1),
    "four dimensions": lambda x: (j()[None, None, None, :] <= i().view(1, 1, ROWS, 1)).expand(2, 1, ROWS, KEYS),
    "added": lambda x: torch.where(j() <= i(), 0.0, -1e9),
    "by arithmetic": lambda x: (1.0 - torch.ones(ROWS, KEYS).tril()) * -10000.0,
    "filled": lambda x: torch.zeros(ROWS, KEYS).masked_fill(j() > i(), -3.0e38),
    "transposed": lambda x: (i().mT >= j()[:, None]).mT,
    "cast": lambda x: torch.ones(ROWS, KEYS).triu(1).bool(),
    "packed sequences that are not": lambda x: (j() <= i()) & same_sequence(torch.arange(KEYS)[None]),
    "constant": lambda x: torch.zeros(ROWS, KEYS) + 1.0,
}

NOT_TOLD = {
    "an input": lambda x: x > 0,
    "two bands": lambda x: (j() <= i()) | (j() > i() + 2),
    "other multiples": lambda x: 2 * j() <= i(),
    "one axis only": lambda x: (j() < 4).expand(ROWS, KEYS),
    "distances": lambda x: (i() - j()).float(),
    "with padding": lambda x: (j() <= i()) & (x[:, :KEYS] > 0),
    "packed sequences": lambda x: (j() <= i()) & same_sequence(x[:1, :KEYS].cumsum(-1)),
    "merged axes": lambda x: (j() <= i()).reshape(-1),
    "written to": lambda x: torch.zeros(ROWS, KEYS).index_fill_(0, torch.tensor([1]), 1.0),
}


def last_value(function):
    """The shadow node of what the function returns, and what it really returns."""
    found = []

    def look(module, inputs):
        shadow = make_shadow(module)
        result = next(n for n in module.graph.nodes if n.op == "output").args[0][0]
        found.append(pattern_of(shadow.image[result]))
        return module.forward

    x = torch.randn(ROWS, 12)
    torch._dynamo.reset()
    return torch.compile(function, backend=look)(x), found[0]


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told_is_the_mask(name):
    actual, pattern = last_value(TOLD[name])
    assert pattern is not None
    expected = torch.empty(actual.shape)
    row, key = (0, 1) if pattern.constant else (pattern.row, pattern.key)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in actual.shape)).tolist():
        inside = pattern.constant or pattern.low <= place[key] - place[row] <= pattern.high
        expected[tuple(place)] = pattern.inside if inside else pattern.outside
    assert torch.equal(expected, actual.float())


@pytest.mark.parametrize("name", NOT_TOLD)
def test_what_cannot_be_told_stays_a_tensor(name):
    assert last_value(NOT_TOLD[name])[1] is None
