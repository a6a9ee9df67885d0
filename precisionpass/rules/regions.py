"""Into how many compiled graphs conditions on sizes split the inputs of a model: a number that is surely reached.

Every condition on a symbolic size is guarded, so inputs that answer any of them otherwise are compiled again. Counted
are answers for which sizes were found, never answers that might be possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from precisionpass.rules.condition import Condition
from precisionpass.rules.facts import FACTS

VARYING = ("batch", "seq_q", "seq_k")  # what differs from one input to the next; all else is the model's
MOST_MODELS = 16
MOST_TRIED = 8_000  # conditions evaluated in one count


def graphs_needed(conditions: Sequence[Condition], enough: int) -> int:
    """How many answers to all conditions together some model's inputs give, at least; counting ends above `enough`."""
    names = sorted({name for condition in conditions for name in condition.names})
    constants = sorted({number for condition in conditions for number in _numbers(condition.tree)})
    values = {name: _values(name, constants) for name in names}
    sizes = {name: values.pop(name) for name in VARYING if name in values}
    most = 0
    models = list(islice(_assignments(values), MOST_MODELS))
    for model in models:
        answers: set[tuple[bool, ...]] = set()
        for sized in islice(_assignments(sizes), MOST_TRIED // len(models) // len(conditions) + 1):
            answers.add(tuple(bool(condition.evaluate(model | sized)) for condition in conditions))
            if len(answers) > enough:
                return len(answers)
        most = max(most, len(answers))
    return most


def _assignments(values: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _values(name: str, constants: Sequence[float]) -> Sequence[object]:
    """Values of a fact that conditions with these numbers may tell apart."""
    fact = FACTS[name]
    if fact.type == "flag":
        return (True, False)
    if fact.type == "word":
        return fact.words
    if fact.type == "number":
        return sorted({0.0, 1e-6, *constants, *(number / 2 for number in constants)})
    near = {math.floor(number) + step for number in constants for step in (-1, 0, 1)}
    return sorted(size for size in near | {2, 2**17} if 2 <= size < 2**31)  # torch compiles 0 and 1 apart anyway


def _numbers(tree: tuple) -> Iterator[float]:
    kind, *parts = tree
    if kind == "constant":
        if not isinstance(parts[0], bool | str):
            yield parts[0]
    elif kind != "fact":
        for part in parts:
            yield from _numbers(part)
