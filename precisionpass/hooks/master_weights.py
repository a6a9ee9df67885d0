"""FP32 master weights and FP32 gradient accumulation for models of 16 bits, around any optimizer of torch.

torch's fused AdamW keeps its state in the dtype of the weight, and adds to a BF16 weight, where whatever is below 2^-9
of it is lost. FSDP2's MixedPrecisionPolicy has FP32 weights by itself: this is for models whose own are of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from precisionpass.errors import PrecisionPassError

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class MasterWeights:
    """FP32 copies of a model's 16-bit parameters, for an optimizer to step.

        masters = precisionpass.MasterWeights(model)
        optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-4))
        for batch in batches:
            loss(batch).backward()
            masters.accumulate()            # FP32 += BF16, after each micro-batch
        optimizer.step()                    # accumulates what is left, steps in FP32, rounds into the model
        optimizer.zero_grad()

    The masters hold the gradients: `optimizer.zero_grad()` clears them, `model.zero_grad()` does not. Weights that are
    loaded into the model later are overwritten at the next step: make new MasterWeights then.
    Parameters of other dtypes are their own masters; those that want no gradient are left out. DTensors of FSDP2 stay
    sharded. Clip `masters.parameters()` after `accumulate`; call it before `GradScaler.unscale_`. Memory for each
    parameter of 16 bits: 4 bytes for the copy, and 4 for its gradient in place of 2.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs = {name: (own, _master(own)) for name, own in model.named_parameters() if own.requires_grad}

    def parameters(self) -> list[Tensor]:
        """The masters, in the model's order."""
        return [master for _, master in self._pairs.values()]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The masters by the model's names, to make groups of: Muon, for one, takes matrices only."""
        return [(name, master) for name, (_, master) in self._pairs.items()]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let each step of `optimizer` accumulate before and round into the model after; returns it.

        A closure given to `step` is called on the rounded weights, and its gradients are accumulated.
        Raises PrecisionPassError (PP503) for an optimizer of other tensors.
        """
        ours = set(map(id, self.parameters()))
        strange = sum(id(tensor) not in ours for group in optimizer.param_groups for tensor in group["params"])
        if strange:
            raise PrecisionPassError(f"{strange} tensors of the optimizer are no master weights", code="PP503",
                                     where="MasterWeights.attach", why="it would step the model's own 16-bit weights",
                                     fix="make it of masters.parameters()")  # fmt: skip
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self.write_back())
        return optimizer

    def _before_step(self, optimizer: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.accumulate()
        given = {"closure": args[1], **kwargs} if len(args) > 1 else dict(kwargs)
        if closure := given.get("closure"):

            def rounded_first() -> object:
                self.write_back()
                loss = closure()
                self.accumulate()
                return loss

            given["closure"] = rounded_first
        return args[:1], given

    def accumulate(self) -> None:
        """Add the gradients of the model to those of the masters, in FP32, and take them away from the model."""
        for own, master in self._pairs.values():
            if own is master or own.grad is None:
                continue
            gradient = own.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            own.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        for own, master in self._pairs.values():
            if own is not master:
                own.copy_(master)

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by name, to be kept beside the optimizer's state dict."""
        return {name: master.detach() for name, (_, master) in self._pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, the model too. Raises PrecisionPassError (PP503) where names or shapes are others."""
        held = {name: master.shape for name, (_, master) in self._pairs.items()}
        if held != {name: tensor.shape for name, tensor in state.items()}:
            wrong = sorted({name for name, _ in held.items() ^ {(n, t.shape) for n, t in state.items()}})
            raise PrecisionPassError(f"master weights of another model: {wrong[0]}", code="PP503",
                                     where="MasterWeights.load_state_dict", why=f"{len(wrong)} names or shapes differ",
                                     fix="load the state of the same model")  # fmt: skip
        for name, (_, master) in self._pairs.items():
            master.copy_(state[name])
        self.write_back()


def _master(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach().float()) if parameter.dtype in SIXTEEN_BIT else parameter
