"""What a config of torchtitan says of the engine: `--slipstream.cutover 4` on its command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.errors import UserError
from slipstream.optim.corrections import Correction, build_correction
from slipstream.schedule.cutover import Cutover, default_cutover


@dataclass(kw_only=True, slots=True)
class Settings:
    """The engine's arguments. What is left out is decided by the engine."""

    correction: str = "error_feedback"
    """What is done about the delay: error_feedback, none, or another name of slipstream.optim.CORRECTIONS."""

    cutover: int | None = None
    """Microbatches of a step that read the weights of one update ago; the others read the newest. None: as many as
    there are stages. 0: synchronous. All of them: PipeDream-2BW."""

    synchronous: int = 0
    """Flush the first steps, this many."""

    in_flight: int | None = None
    """Microbatches that the first stage keeps between forward and backward. None: measured."""

    timeout_seconds: float = 300.0
    """A neighbour that is silent for longer is an error that names it."""

    optimizer: str | None = None
    """An optimizer of slipstream by name (muon, ...), sharded over FSDP2. None: torchtitan's own, as configured."""

    lr: float | None = None
    """Learning rate of that optimizer. None: its default."""

    optimizer_options: dict[str, float] = field(default_factory=dict)
    """Further options of that optimizer, for example weight_decay 0.1 momentum 0.95."""

    def __post_init__(self) -> None:
        if self.optimizer is None and (self.lr is not None or self.optimizer_options):
            raise UserError(
                "slipstream.lr and slipstream.optimizer_options belong to slipstream.optimizer, which is not set. Name "
                "one (muon), or set torchtitan's optimizer.param_groups."
            )

    def old_part(self, stages: int, microbatches: int) -> int:
        """The cutover of every step, as a number."""
        if self.cutover is not None:
            return self.cutover
        whole = self.made().corrects_gradient  # such a correction takes a gradient that is old throughout
        return microbatches if whole else default_cutover(stages, microbatches)

    def replicas(self, stages: int, microbatches: int) -> int:
        """How many copies of a stage the engine asks for beside the master; it refuses any other number."""
        cutover = Cutover(microbatches, self.old_part(stages, microbatches), lambda group: False)
        return 3 if cutover.mixed and self.made().looks_ahead else 2

    def made(self) -> Correction:
        return build_correction(self.correction)
