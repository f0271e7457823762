"""The folder from which vLLM learns what model it runs: a configuration, and the tokenizer where text ends completions.

Weights are not in it: they come from the trainer.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...conversion.architecture import CONFIG_NAME, Architecture, architecture_of, config_of, read_config
from ...conversion.mapping import WeightMapping
from ...errors import WeightSyncFailed
from ...weight_sync.wire import Manifest

MAX_REPORTED = 5


def write_model_folder(folder: Path, architecture: Architecture, *, eos_id: int, pad_id: int, dtype: str) -> None:
    """`architecture.vocab_size` counts the tokenizer's ids: none is padding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(architecture, dtype) | {"eos_token_id": eos_id, "pad_token_id": pad_id}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_manifest(folder: Path, manifest: Manifest, dtype: str) -> None:
    """Raise WeightSyncFailed unless the trainer sends what the model in `folder` is made of. `dtype`: the engine's;
    float32 is loaded into any.
    """
    expected = WeightMapping(architecture_of(read_config(folder))).hf_shapes
    sent = {meta.name: meta for meta in manifest}
    problems = [f"{name} {expected[name]} is not sent" for name in sorted(expected.keys() - sent.keys())]
    problems += [f"{name} is no tensor of the engine's model" for name in sorted(sent.keys() - expected.keys())]
    for name in sorted(expected.keys() & sent.keys()):
        meta = sent[name]
        if meta.shape != expected[name]:
            problems.append(f"{name}: the trainer sends shape {meta.shape}, the engine expects {expected[name]}")
        if meta.dtype not in (dtype, "float32"):
            problems.append(f"{name}: the trainer sends {meta.dtype}, the engine holds {dtype}")
    if problems:
        shown = "\n".join(problems[:MAX_REPORTED])
        raise WeightSyncFailed(f"nothing was sent: {len(problems)} differences between trainer and engine:\n{shown}")
