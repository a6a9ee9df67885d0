"""A callback for the Trainer of Hugging Face: figures into its history, alarms as they come. Needs transformers."""

from __future__ import annotations

from typing import Any, Literal

from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

from precisionpass.hooks.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Reads a monitor every so many optimizer steps.

    Trainer(..., callbacks=[MonitorCallback(precisionpass.monitor(model), every=100)]). The figures join
    `state.log_history`, so they are in `trainer_state.json`, as "precisionpass/SITE/FIGURE"; the Trainer's own reports
    are written before a callback of yours is asked. writer: a TensorBoard SummaryWriter that gets them too, on the
    first process. on_alarm: "raise" ends the training, "warn" warns. Reading is collective, and every process calls it.
    """

    def __init__(
        self, monitor: Monitor, every: int = 100, on_alarm: Literal["raise", "warn"] = "warn", writer: Any = None
    ) -> None:
        self.monitor, self.every, self.on_alarm, self.writer = monitor, every, on_alarm, writer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer after each optimizer step."""
        if state.global_step % self.every:
            return
        found = {f"precisionpass/{name}": value for name, value in self.monitor.scalars().items()}
        state.log_history.append(found | {"step": state.global_step})
        if self.writer is not None and state.is_world_process_zero:
            for name, value in found.items():
                self.writer.add_scalar(name, value, state.global_step)
        self.monitor.check(self.on_alarm)
