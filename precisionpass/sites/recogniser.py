"""What finds sites: a kind and a function that looks through one graph. Those of the package and a user's alike."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from precisionpass.errors import PrecisionPassError
from precisionpass.sites.anchors import SoftmaxAnchor
from precisionpass.sites.site import NearMiss, Site


@dataclass(frozen=True)
class Search:
    """What a recogniser looks at. Nothing in it may be changed.

    nodes: the calls of a graph in order, each an ATen operator before autograd (`node.target` is, for example,
    `torch.ops.aten.relu.default`), with `node.meta["val"]` a fake tensor of its shape and dtype. writes: those that
    change a tensor in place. softmaxes: in every spelling. taken: what sites that were recognised earlier replace.
    """

    nodes: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    softmaxes: tuple[SoftmaxAnchor, ...]
    taken: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True)
class Found:
    """A site of one's own. Whatever lies between `inputs` and `output` is replaced by a call of the rule's action.

    inputs: the action's arguments in order: nodes, or plain values. output: a tensor. formula: what the site computes,
    for the review. facts: what `where` and predicates may ask, beside dtype, device and training.
    """

    inputs: tuple[object, ...]
    output: fx.Node
    formula: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Recogniser:
    """One way of finding sites: Recogniser("own.squared_relu", find), with find(search) giving a Found for each.

    kind: "own." and a name; it is what rules write as op. Rules that match it name an action of one's own as
    implementation. Passed to compile and explain as sites=[*default_sites, mine]; earlier ones have the first choice.
    """

    kind: str
    find: Callable[[Search], Iterable[Site | NearMiss | Found]]

    def __post_init__(self) -> None:
        if not callable(self.find):
            raise wrong_recogniser(self.kind, f"find is a {type(self.find).__name__}, not a function of (search)")


def wrong_recogniser(kind: object, why: str, what: str = "cannot be used") -> PrecisionPassError:
    """The error for a recogniser that is made wrongly, fails, or gives what is no site."""
    return PrecisionPassError(
        f"the recogniser {kind} {what}", where="sites=", why=why, code="PP132",
        fix='it is made as Recogniser("own.NAME", find); find(search) gives Found(inputs=(node, ...), output=node)',
    )  # fmt: skip
