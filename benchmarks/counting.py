"""Counts attention and norms while a model runs in eager mode, by tags on its tensors: no graph, nothing of the pass.

A product of two tensors that are no weights makes scores; a softmax of scores makes probabilities; a product of
probabilities with something that is no weight is one attention. Fused attention calls count one each. A mean of squares
whose inverse root multiplies something is one RMS norm.
"""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch.ops import aten
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

PRODUCTS = {aten.bmm, aten.mm, aten.addmm, aten.baddbmm, aten.addbmm, aten.convolution}
SOFTMAXES = {aten._softmax, aten._safe_softmax}
ROOTS = {aten.rsqrt, aten.sqrt, aten.reciprocal, aten.pow}
SUMS = {aten.sum, aten.mean, aten.amax, aten.argmax, aten.topk, aten.cumsum}


class Counting(TorchDispatchMode):
    """`counts`: attention, layer_norm, rms_norm, as they ran. Tags: (what, number of the event that made it)."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.counts: Counter = Counter()
        self.tags = WeakTensorKeyDictionary()
        self.numbers = itertools.count()
        self.seen: set = set()
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            self.tags[tensor] = frozenset({("weight", 0)})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tags = self._of(function.overloadpacket, args, tensors)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and tags:
                before = self.tags.get(leaf, frozenset()) if any(leaf is tensor for tensor in tensors) else frozenset()
                self.tags[leaf] = before | tags
        return result

    def _of(self, kind, args, tensors: list[torch.Tensor]) -> frozenset:
        """Tags of a call's results, from those of what it reads."""
        read = [self.tags.get(tensor, frozenset()) for tensor in tensors]
        named = [{what for what, _ in tags} for tags in read]
        if "scaled_dot_product" in str(kind) or "flash_attention" in str(kind):
            self.counts["attention"] += 1
            return frozenset()
        if kind is aten.native_layer_norm:
            self.counts["layer_norm"] += 1
            return frozenset()
        if kind in PRODUCTS:
            sides = list(zip(read, named, strict=True))[-2:]
            if any("weight" in names for _, names in sides):
                return frozenset()
            for tags, _ in sides:
                self._once("attention", tags, "probabilities")
            probable = any("probabilities" in names for _, names in sides)
            return frozenset() if probable else frozenset({("scores", next(self.numbers))})
        together = frozenset().union(*read)
        if kind in SOFTMAXES:
            return frozenset({("probabilities", next(self.numbers))}) if "scores" in named[0] else frozenset()
        if kind is aten.mean and "square" in named[0]:
            return frozenset({("mean square", next(self.numbers))})
        squared = kind is aten.pow and len(tensors) == 1 and args[1:] == (2,)
        if squared or (kind is aten.mul and len(tensors) == 2 and args[0] is args[1]):
            return frozenset({("square", next(self.numbers))})
        if kind in ROOTS:
            return frozenset({("root", number) for what, number in together if what in ("mean square", "root")})
        if kind in (aten.mul, aten.div):
            self._once("rms_norm", together, "root")
            together = frozenset(tag for tag in together if tag[0] != "root")
        if kind in SUMS:
            return frozenset()
        weights = all("weight" in names for names in named) and bool(named)
        return frozenset(tag for tag in together if tag[0] != "square" and (tag[0] != "weight" or weights))

    def _once(self, kind: str, tags: frozenset, what: str) -> None:
        for tag in tags:
            if tag[0] == what and tag not in self.seen:
                self.seen.add(tag)
                self.counts[kind] += 1
