"""Two (or more) gloo processes that compute their parts of a loss case and reduce them, as data-parallel ranks do."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_grpo.algorithms.loss import Normalizer, grpo_loss
from tests.unit.loss_case_batches import DTYPES, config_of, counts_of, loss_inputs, numbers


def reduced_over_ranks(cases: list[dict], world_size: int, folder: Path) -> dict:
    """{case id: {dtype name: {"total", "parts", "gradient"}}} of `{"id", "config", "ranks": [batch, ...]}` cases."""
    (folder / "cases.json").write_text(json.dumps(cases))
    mp.spawn(_rank, args=(world_size, str(folder)), nprocs=world_size)
    return json.loads((folder / "reduced.json").read_text())


def _rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    cases = json.loads(Path(folder, "cases.json").read_text())
    reduced = {
        case["id"]: {name: _reduce(case, rank, world_size, dtype) for name, dtype in DTYPES.items()} for case in cases
    }
    if rank == 0:
        Path(folder, "reduced.json").write_text(json.dumps(reduced))
    dist.destroy_process_group()


def _reduce(case: dict, rank: int, world_size: int, dtype: torch.dtype) -> dict:
    """Counts first, then loss parts and gradients: every reduction is a plain sum."""
    config = config_of(case["config"])
    counts = torch.tensor(counts_of(case["ranks"][rank]))
    dist.all_reduce(counts)
    inputs = loss_inputs(case["ranks"][rank], dtype)
    output = grpo_loss(config, inputs, Normalizer(num_tokens=int(counts[0]), num_sequences=int(counts[1])))
    output.loss.backward()

    sizes = [len(numbers(batch["curr"])) for batch in case["ranks"]]
    offset = sum(sizes[:rank])
    parts, gradient = torch.zeros(world_size, dtype=dtype), torch.zeros(sum(sizes), dtype=dtype)
    parts[rank] = output.loss.detach()
    gradient[offset : offset + sizes[rank]] = inputs.current_logprobs.grad.flatten()
    total = output.loss.detach().clone()
    for tensor in (parts, gradient, total):
        dist.all_reduce(tensor)
    return {"total": total.item(), "parts": parts.tolist(), "gradient": gradient.tolist()}
