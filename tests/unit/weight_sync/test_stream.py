"""A stream of weights: what buckets hold, what is summed, what a difference is called. The channel is a list."""

import pytest
import torch

from megatron_grpo.errors import WeightSyncFailed
from megatron_grpo.weight_sync.stream import StreamSeat, WeightStream, sum_differences
from megatron_grpo.weight_sync.wire import TensorMeta, buckets, buffer_for, total_bytes, views

CPU = torch.device("cpu")
TENSORS = {
    "embed": torch.arange(21.0).reshape(7, 3),
    "norm": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(4.0, dtype=torch.float64),
    "big": torch.arange(100.0),
    "last": torch.ones(2, 2),
}
MANIFEST = [TensorMeta.of(name, tensor) for name, tensor in TENSORS.items()]


class Walk:
    """An export of `tensors`."""

    manifest = MANIFEST

    def __init__(self, tensors=TENSORS):
        self._tensors = tensors

    def walk(self):
        yield from self._tensors.items()


class Recorded:
    def __init__(self, seat, fail_at=None):
        self.buffers, self.closed, self._fail_at = [], False, fail_at

    def broadcast(self, buffer):
        if len(self.buffers) == self._fail_at:
            raise RuntimeError("Connection closed by peer")
        self.buffers.append(buffer.clone())

    def close(self):
        self.closed = True


def seat(num_workers=1):
    return StreamSeat(host="localhost", port=1, num_workers=num_workers, timeout_s=5)


def stream(channel, *, rank=0, tensors=TENSORS, bucket_bytes=160):
    return WeightStream(
        Walk(tensors), rank=rank, device=CPU, open_channel=lambda seat: channel, bucket_bytes=bucket_bytes
    )


def test_every_tensor_is_in_one_bucket_and_only_a_tensor_that_is_too_large_exceeds_the_limit():
    runs = list(buckets(MANIFEST, 160))
    assert [[meta.name for meta in run] for run in runs] == [["embed", "norm", "scalar"], ["big"], ["last"]]
    assert [buffer_for(run, CPU).numel() for run in runs] == [96 + 16 + 16, 400, 16]
    assert total_bytes(MANIFEST) == 84 + 6 + 8 + 400 + 16
    assert list(buckets([], 160)) == []


def test_what_was_sent_is_read_back_bit_for_bit_from_the_buckets():
    channel = Recorded(None)
    sender = stream(channel)
    sender.join(seat())
    sums = sender.send()
    arrived = {}
    for run, buffer in zip(buckets(MANIFEST, 160), channel.buffers, strict=True):
        arrived |= dict(views(buffer, run))
    assert arrived.keys() == TENSORS.keys() == sums.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in TENSORS.items())


def test_the_size_of_the_buckets_does_not_change_the_sums():
    found = []
    for size in (1, 160, 1 << 20):
        sender = stream(Recorded(None), bucket_bytes=size)
        sender.join(seat())
        found.append(sender.send())
    assert found[0] == found[1] == found[2]


def test_without_a_worker_nothing_is_opened_but_everything_is_summed():
    sender = WeightStream(Walk(), rank=0, device=CPU, open_channel=None)
    sender.join(seat(num_workers=0))
    assert sender.send().keys() == TENSORS.keys()


def test_other_ranks_walk_and_send_nothing():
    sender = WeightStream(Walk({}), rank=1, device=CPU, open_channel=None)
    sender.join(seat())
    assert sender.send() is None


def test_a_lost_worker_breaks_the_stream_until_it_is_joined_again():
    channel = Recorded(None, fail_at=1)
    sender = stream(channel)
    sender.join(seat())
    with pytest.raises(WeightSyncFailed, match="could not send the weights.*timeouts.refit = 5 s.*closed by peer"):
        sender.send()
    assert channel.closed
    with pytest.raises(WeightSyncFailed, match="not joined again"):
        sender.send()


def test_a_tensor_that_is_not_what_was_announced_is_not_sent():
    sender = stream(Recorded(None), tensors={**TENSORS, "norm": torch.zeros(4)})
    sender.join(seat())
    with pytest.raises(WeightSyncFailed, match="norm"):
        sender.send()


def test_differences_are_named_by_tensor_and_worker():
    sent, arrived = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}
    found = sum_differences(sent, arrived, "worker 0 of replica 1")
    assert [line.split(":")[0] for line in found] == ["c", "d", "b"]
    assert all("worker 0 of replica 1" in line for line in found)
    assert sum_differences(sent, dict(sent), "w") == []
