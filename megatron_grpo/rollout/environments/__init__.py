"""What a response is worth. Built-in environments, and how a user's own one is found by `env.NAME.target`."""

from .build import BUILT_IN, blocks_in_use, build_environment
from .math_answers import MathVerify
from .reasoning_tasks import ReasoningGym
from .sort_digits import SortDigits

__all__ = ["BUILT_IN", "MathVerify", "ReasoningGym", "SortDigits", "blocks_in_use", "build_environment"]
