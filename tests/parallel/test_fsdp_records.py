"""torch's records of sharded parameters."""

from types import SimpleNamespace

import torch

from paramp.parallel.fsdp.records import drop_prefetched


def test_a_dropped_all_gather_is_waited_for_on_the_stream_of_its_device(monkeypatch):
    """``wait_event`` of a ``torch.Stream`` does not wait for a ``torch.cuda.Event``, which FSDP2 records on a GPU."""
    waited = []

    class Stream:
        def __init__(self, kind):
            self.kind = kind

        def wait_event(self, event):
            waited.append((self.kind, event))

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream("torch.Stream"))
    handle = SimpleNamespace(current_stream=lambda: Stream("torch.cuda.Stream"))
    result = SimpleNamespace(all_gather_work=None, all_gather_event="event")
    group = SimpleNamespace(_all_gather_result=result, device_handle=handle)
    drop_prefetched(group)
    assert waited == [("torch.cuda.Stream", "event")]
    assert group._all_gather_result is None
