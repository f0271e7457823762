"""The one place that adapts libraries to the machine: CUDA or CPU, NCCL or gloo."""
