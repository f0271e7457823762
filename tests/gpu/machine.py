"""Refuses a machine on which the GPU run cannot start, in one message; otherwise says what it is."""

import importlib.util
import sys

NEEDED = (
    "megatron.core", "ray", "omegaconf", "pydantic", "yaml", "transformers", "tokenizers", "tensorboard", "rich",
    "math_verify", "reasoning_gym", "zmq", "msgpack", "einops",
)  # fmt: skip


def missing_modules() -> list[str]:
    missing = []
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent of a dotted name is missing
            found = None
        if found is None:
            missing.append(name)
    return missing


def main() -> int:
    if sys.version_info[:2] not in ((3, 12), (3, 13)):
        print(f"Python {sys.version.split()[0]} found, 3.12 or 3.13 needed: set PYTHON", file=sys.stderr)
        return 1
    missing = missing_modules()
    if missing:
        print(f"not installed and no wheel in ./wheels provides: {', '.join(missing)}", file=sys.stderr)
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
