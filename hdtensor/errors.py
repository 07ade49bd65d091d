"""The exception types of hdtensor, and nothing else.

Every message says what came, what is allowed, and what to do next. Each type also derives from the
built-in that PyTorch raises in the like situation, so that existing handlers keep working.
"""


class HDTensorError(Exception):
    """Base of every error that hdtensor raises on purpose."""


class TorchVersionError(HDTensorError, ImportError):
    """The installed torch lacks a private name that hdtensor uses; the message says which, and which torch has it."""


class ConfigError(HDTensorError, ValueError):
    """An environment variable of hdtensor has a value that it may not have."""


class SpecError(HDTensorError, ValueError):
    """A sharding specification is malformed, or does not fit the tensor it is applied to."""


class PlanError(HDTensorError, ValueError):
    """An annotation plan is malformed, or does not fit the model or the world."""


class ScheduleError(HDTensorError, ValueError):
    """A pipeline schedule is malformed, incomplete, out of order, or would wait for ever."""


class PipelineError(HDTensorError, RuntimeError):
    """A pipeline's step ended because another rank failed; the message names the first that did."""


class DeductionError(HDTensorError, RuntimeError):
    """An operator cannot run on operands that are laid out like this."""


class RedistributeError(HDTensorError, RuntimeError):
    """A tensor cannot be brought from one spec to another."""


class NonLocalError(HDTensorError, RuntimeError):
    """A value was read on a rank that holds no part of it."""


class GroupError(HDTensorError, RuntimeError):
    """A process group is needed that was not created on every rank beforehand."""


class DisagreementError(HDTensorError, RuntimeError):
    """Ranks called one collective function with arguments that do not fit together."""


class TopologyError(HDTensorError, ValueError):
    """A description of nodes and links is malformed, or does not cover the ranks that use it."""


class PlannerError(HDTensorError, ValueError):
    """The planner was given what it cannot plan for; the message begins with the name of the field."""


class CheckpointError(HDTensorError, RuntimeError):
    """A checkpoint cannot be written or read: a damaged file, or tensors that do not fit it."""


class SwitchError(HDTensorError, RuntimeError):
    """A switch of plans did not come to its end; the message says what holds now.

    Attributes:
        moved: Names of the tensors that are in the new plan.
        left: Names of those in the old one, where some are in the new.
    """

    def __init__(
        self, message: str, *, moved: tuple[str, ...] = (), left: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.moved = moved
        self.left = left
