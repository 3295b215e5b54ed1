"""TensorBoard: event files in the run's folder, `tensorboard --logdir DIR`."""

from __future__ import annotations

from typing import Any

from linvit.toml import to_toml
from linvit.training.trackers import TRACKERS, Tracker


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Scalars by step, and the experiment as text."""

    package = "tensorboard"

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self.writer.add_text("experiment", f"```toml\n{to_toml(self.experiment.settings())}```", 0)

    def log(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, diverged: bool) -> None:
        self.writer.close()
