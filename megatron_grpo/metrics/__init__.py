"""Metrics: values that carry their counts, time by cause, what one step reports, and where it is written.

Knows types and errors only; never how a step is computed. TensorBoard and wandb load when their sink opens.
"""

from .clock import Stopwatch
from .fresh import fresh_error
from .step import StepMetrics, group_metrics, step_metrics
from .tally import Tally
from .values import Max, Mean, Metric, Sum, merge, to_floats
from .writer import MetricsWriter

__all__ = [
    "Max",
    "Mean",
    "Metric",
    "MetricsWriter",
    "StepMetrics",
    "Stopwatch",
    "Sum",
    "Tally",
    "fresh_error",
    "group_metrics",
    "merge",
    "step_metrics",
    "to_floats",
]
