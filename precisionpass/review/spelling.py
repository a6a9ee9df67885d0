"""Calls of a captured graph in Python's own words."""

import builtins
import enum
import math
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from keyword import iskeyword

import torch
from torch import fx
from torch.fx.node import Argument

from precisionpass import graph
from precisionpass.review.plain import shown
from precisionpass.sites.describe import short

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_SIGNS = {"mul": "×", "truediv": "÷", "sub": "−", "matmul": "matmul"}  # in drawings
LONGEST_LABEL = 32
_HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, operator, builtins)
_OF_TORCH = ("aten", "prims", "prim", "profiler", "inductor", "quantized", "_c10d_functional", "c10d_functional")
_OPS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
# A body that is recomputed in the backward, or only marked: it computes what calling it computes.
_CALLS_ITS_BODY = ("tag_activation_checkpoint", "wrap")


class Unwritable(Exception):
    """A call that no file could repeat; the message names what it calls."""


class Speller:
    """Writes calls over the names given for nodes. imports: the modules beside torch that what was written needs.

    device: stands for every device that a call names, where given.
    """

    def __init__(self, names: Mapping[fx.Node, str], device: torch.device | None = None):
        self.names, self.device = names, device
        self.imports: set[str] = set()
        self.elsewhere: set[str] = set()

    @property
    def warnings(self) -> list[str]:
        """A line of comment for each op that neither torch nor this package registers."""
        return [f"# {name} is registered elsewhere: import its module first." for name in sorted(self.elsewhere)]

    def call(self, node: fx.Node) -> str:
        """The call of a node as one expression. Raises Unwritable."""
        keywords = [f"{name}={self.value(held)}" for name, held in node.kwargs.items()]
        arguments = [self.value(argument) for argument in node.args]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *keywords])})"
        if node.op != "call_function" or not callable(node.target):
            raise Unwritable(f"the module {shown(node.target)}")
        if node.target in _INFIX and len(arguments) == 2 and not keywords:
            return f" {_INFIX[node.target]} ".join(f"({a})" if a.startswith("-") else a for a in arguments)
        if node.target is operator.getitem:
            return f"{arguments[0]}[{self._index(node.args[1])}]"
        if node.target is getattr and str(node.args[1]).isidentifier():
            return f"{arguments[0]}.{node.args[1]}"
        if _higher_order(node.target) in _CALLS_ITS_BODY:
            return f"{arguments[0]}({', '.join(arguments[1:])})"
        return f"{self.function(node.target)}({', '.join([*arguments, *keywords])})"

    def label(self, node: fx.Node) -> tuple[str, tuple[str, ...]]:
        """The call in a few words, without what it reads: ("softmax(dim=-1)", ()). The settings of an op of this
        package, and whatever is too long, stand apart: ("precisionpass.attention", ("scale=0.125", ...)).
        """
        name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        settings = [self.value(a) for a in node.args if not _reads(a)]
        if node.target is operator.getitem:
            return f"[{self._index(node.args[1])}]", ()
        if node.target is getattr:
            return f".{node.args[1]}", ()
        if node.target in _INFIX:
            return " ".join([_SIGNS.get(name, _INFIX[node.target]), *settings]), ()
        settings += [f"{k}={self.value(v)}" for k, v in node.kwargs.items() if not _reads(v) and v is not None]
        if isinstance(node.target, _OPS) and str(node.target).startswith("precisionpass."):
            return ".".join(str(node.target).split(".")[:2]), tuple(settings)
        settings = [setting.replace("torch.", "") for setting in settings]
        short = f"{name}({', '.join(settings)})" if settings else name
        if len(short) <= LONGEST_LABEL:
            return short, ()
        return name, tuple(textwrap.wrap(", ".join(settings), LONGEST_LABEL, break_on_hyphens=False))

    def function(self, target: Callable) -> str:
        """A dotted name under which another file finds this very function. Raises Unwritable."""
        if isinstance(target, _OPS):
            namespace = str(target).partition(".")[0]
            if namespace == "precisionpass":
                self.imports.add("precisionpass.ops")
            elif namespace not in _OF_TORCH:
                self.elsewhere.add(str(target))
            return f"torch.ops.{target}"
        if _higher_order(target):
            return f"torch.ops.higher_order.{_higher_order(target)}"
        name = getattr(target, "__name__", "")
        for home in _HOMES:
            if getattr(home, name, None) is target:
                self.imports |= {"operator"} if home is operator else set()
                return name if home is builtins else f"{home.__name__}.{name}"
        module, path = str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", name))
        if module == "__main__" or _found(module, path) is not target:
            raise Unwritable(shown(path or target))
        self.imports |= {module} if module.partition(".")[0] != "torch" else set()
        return f"{module}.{path}"

    def value(self, argument: object) -> str:
        """An argument as an expression. Raises Unwritable."""
        match argument:
            case fx.Node():
                return self.names[argument]
            case None | bool() | int() if not isinstance(argument, enum.Enum):
                return repr(argument)
            case float():
                return repr(argument) if math.isfinite(argument) else f'float("{argument}")'
            case str():
                return ascii(argument)
            case torch.dtype() | torch.memory_format() | torch.layout():
                return str(argument)
            case torch.device():
                return f'torch.device("{self.device or argument}")'
            case slice():
                return f"slice({', '.join(map(self.value, (argument.start, argument.stop, argument.step)))})"
            case list():
                return f"[{', '.join(map(self.value, argument))}]"
            case tuple():
                return f"({', '.join(map(self.value, argument))}{',' if len(argument) == 1 else ''})"
            case Mapping():
                return f"{{{', '.join(f'{self.value(k)}: {self.value(v)}' for k, v in argument.items())}}}"
            case torch.SymInt() | torch.SymFloat():
                return repr(graph.hint(argument))
        if argument is ...:
            return "..."
        if isinstance(argument, enum.Enum) and _found(type(argument).__module__, type(argument).__qualname__):
            return f"{self.function(type(argument))}.{argument.name}"
        if callable(argument):
            return self.function(argument)
        raise Unwritable(f"a {shown(type(argument).__name__)}")

    def _index(self, index: object) -> str:
        """What stands between brackets, slices as colons."""
        if not isinstance(index, tuple) or not index:
            return self._one_index(index)
        return ", ".join(map(self._one_index, index)) + ("," if len(index) == 1 else "")

    def _one_index(self, part: object) -> str:
        if not isinstance(part, slice):
            return self.value(part)
        start, stop, step = ("" if held is None else self.value(held) for held in (part.start, part.stop, part.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")


def _reads(argument: Argument) -> bool:
    """Whether an argument holds the result of another call."""
    found: list[fx.Node] = []
    fx.map_arg(argument, lambda node: found.append(node))
    return bool(found)


def _higher_order(target: object) -> str:
    """The name of a higher-order operator, "" for anything else."""
    return target.name() if getattr(target, "namespace", "") == "higher_order" else ""  # type: ignore[attr-defined]


def _found(module: str, path: str) -> object:
    """What stands under this name in this module, None where nothing does."""
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def type_of(node: fx.Node) -> str:
    """What a node computes, in the words of the review: bf16[2, 12, s0, 64]."""
    return _type_of(graph.value(node))


def _type_of(held: object) -> str:
    if isinstance(held, torch.Tensor):
        return f"{short(held.dtype)}[{', '.join(str(graph.expression(size)) for size in held.shape)}]"
    if isinstance(held, torch.SymInt | torch.SymFloat):
        return f"size {graph.expression(held)}"
    if isinstance(held, tuple | list):
        shown_ones = [*map(_type_of, held[:2]), *([f"{len(held) - 2} more"] if len(held) > 2 else [])]
        return f"({', '.join(shown_ones)})"
    return "" if held is None else type(held).__name__


def readable(placeholder: str) -> str:
    """`L_self_modules_h_modules_0_parameters_weight_` as `h_0_weight`, a name that a person can follow."""
    name = re.sub(r"_(?:modules|parameters|buffers)(?=_)", "", f"_{placeholder}")
    name = re.sub(r"^_[lL]_(?:self|kwargs|args)?", "", name).strip("_")
    usable = name.isidentifier() and not iskeyword(name) and not hasattr(builtins, name)
    return name if usable and name not in ("torch", "operator", "precisionpass") else placeholder
