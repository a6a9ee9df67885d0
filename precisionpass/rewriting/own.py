"""An action of the user's in place of a site's calls: it is tried on fake tensors before anything is replaced."""

from collections.abc import Callable, Mapping

import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.errors import PrecisionPassError
from precisionpass.rewriting.writer import ActionRefuses, Placed, Writer, order_in_memory
from precisionpass.shadow import Shadow, fill_in_examples
from precisionpass.sites.site import Own

Actions = Mapping[str, Callable]


def write_own(decision: Decision, shadow: Shadow, actions: Actions) -> Placed:
    """Replace a site of the user's kind by its action. Raises CannotPlace, the graph as it was."""
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Own)
    writer = Writer(shadow, operation.output)
    try:
        inputs = [writer.captured(one) if isinstance(one, fx.Node) else one for one in operation.inputs]
        like = graph.value(operation.output)
        result = call_action(writer, decision, actions, inputs, {}, lambda: like)
        result = writer.laid_out_as(operation.output, result, order_in_memory(result))
        return writer.replace(site.interior, {operation.output: result})
    except Exception:
        writer.undo()
        raise


def call_action(
    writer: Writer, decision: Decision, actions: Actions, args: list, kwargs: Mapping[str, object],
    like: Callable[[], torch.Tensor],
) -> fx.Node:  # fmt: skip
    """The call of the decision's action, whose one result is a tensor of the shape, dtype and device of `like`.

    like: asked once the arguments have their example values. Raises ActionRefuses where the action raises
    NotImplementedError, PrecisionPassError for anything else it does wrong.
    """
    name = decision.own_action
    call = writer.call(actions[name], *args, **kwargs)
    try:
        fill_in_examples(writer.before.graph.owning_module, writer.made, writer.shadow.ambient, strict=True)
    except NotImplementedError as refusal:
        raise ActionRefuses(str(refusal) or name) from None
    except Exception as error:
        raise _wrong(decision, f"{type(error).__name__}: {str(error).strip()[:400]}") from error
    given, wanted = graph.value(call), like()
    if not isinstance(given, torch.Tensor):
        raise _wrong(decision, f"it gave a {type(given).__name__}, not one tensor")
    same_shape = given.dim() == wanted.dim() and all(map(graph.same_size, given.shape, wanted.shape))
    if not same_shape or given.dtype != wanted.dtype or given.device != wanted.device:
        raise _wrong(decision, f"it gave {_shown(given)} where the model has {_shown(wanted)}")
    return call


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]} on {tensor.device}"


def _wrong(decision: Decision, why: str) -> PrecisionPassError:
    place = decision.origin.module or decision.origin.source
    return PrecisionPassError(
        f"the action {decision.own_action} failed at a {decision.site.kind} site", where=place, why=why, code="PP133",
        fix="an action gives one tensor of the shape and dtype that it replaces, on fake tensors too; it raises "
        "NotImplementedError for a site that is to stay as it is",
    )  # fmt: skip
