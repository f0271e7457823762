"""The exceptions a user or the loop can meet; everything else is a bug and keeps its own traceback.

Each message says what happened, shows the value, and says what to change.
"""


class MegatronGrpoError(Exception):
    """Base of the errors below; the command line prints their message without a traceback."""


class ConfigError(MegatronGrpoError):
    """The recipe cannot run. `problems` holds every finding, one line each; exit code 2."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


class DataError(ConfigError):
    """A data file, prompt source or environment option cannot be used (file and line named)."""


class ConversionError(ConfigError):
    """A model directory or checkpoint cannot be converted: the file, tensor or key, and what is wrong with it."""


class RunFailed(MegatronGrpoError):
    """The run ended because a part of it failed; the message carries the part's own error. Exit code 1."""


class GenerationFailed(RunFailed):
    """More groups failed in a row than `grpo.async_grpo.max_generation_failures` tolerates."""


class SamplingExhausted(RunFailed):
    """Dynamic sampling threw away more groups than `grpo.dynamic_sampling_max_gen_batches` allows for one step."""


class RewardFailed(MegatronGrpoError):
    """An environment raised, timed out or answered with the wrong number of rewards: the group fails."""


class DeadlineExceeded(RunFailed):
    """A wait ran into its deadline; the message names who waited, for what, and since when."""


class ReplayClosed(MegatronGrpoError):
    """The buffer was closed while someone waited; `str()` carries the cause that closed it."""


class EndOfData(MegatronGrpoError):
    """No further batch can be filled: the prompts are used up. Not a failure."""


class CheckpointError(MegatronGrpoError):
    """A checkpoint is damaged, foreign or cannot be written; names the file and what is wrong."""


class Interrupted(MegatronGrpoError):
    """A signal ended the run before its last step; `exit_code` is 128 + the signal's number, as shells expect."""

    def __init__(self, number: int):
        self.exit_code = 128 + int(number)
        super().__init__(f"interrupted by signal {int(number)} before the last step")


class WeightSyncFailed(RunFailed):
    """New weights did not arrive, or what arrived is not what was sent; the version was not bumped."""
