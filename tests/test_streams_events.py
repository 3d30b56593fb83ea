"""Streams and events. Work of a device runs in the order of the launches, so what an event marks is the work before it."""

from __future__ import annotations

import math
import threading

import pytest
import torch


def work() -> torch.Tensor:
    x = torch.ones(256, 256, device="tpu")
    for _ in range(5):
        x = x @ x / 256
    return x


def test_streams_are_streams_of_a_device():
    a, b, c = torch.tpu.Stream(), torch.tpu.Stream(), torch.tpu.Stream(device="tpu:1", priority=-1)
    assert a != b
    assert hash(a) != hash(b)
    assert a == torch.Stream(stream_id=a.stream_id, device_index=a.device_index, device_type=a.device_type)
    assert (a.device, c.device) == (torch.device("tpu:0"), torch.device("tpu:1"))


def test_plain_streams_and_events_count_as_ours():
    for stream in (
        torch.tpu.Stream(),
        torch.Stream("tpu:1"),
        torch.tpu.current_stream(),
        torch.accelerator.current_stream(),
    ):
        assert isinstance(stream, torch.tpu.Stream)
        assert isinstance(stream, torch.Stream)
    assert isinstance(torch.tpu.Stream().record_event(), torch.tpu.Event)
    assert isinstance(torch.tpu.Event(), torch.Event)
    assert not isinstance(torch.Event("cpu"), torch.tpu.Event)
    assert not isinstance(torch.Stream("cpu"), torch.tpu.Stream)
    assert not isinstance(1, torch.tpu.Event)


def test_current_stream_nests():
    default = torch.tpu.current_stream()
    assert default == torch.tpu.default_stream()
    assert default.stream_id == 0
    a, b = torch.tpu.Stream(), torch.tpu.Stream(device=1)
    with torch.tpu.stream(a):
        assert torch.tpu.current_stream() == a
        with torch.tpu.stream(b), torch.tpu.stream(None):
            assert torch.tpu.current_device() == 1
            assert torch.tpu.current_stream() == torch.tpu.current_stream(1) == b
            assert torch.tpu.current_stream(0) == a
        assert (torch.tpu.current_device(), torch.tpu.current_stream()) == (0, a)
    assert torch.tpu.current_stream() == default
    with a:
        assert torch.tpu.current_stream() == a
    assert torch.tpu.current_stream() == default


def test_set_stream_sets_the_device_too():
    stream = torch.tpu.Stream(device=1)
    torch.tpu.set_stream(stream)
    assert torch.tpu.current_device() == 1
    assert torch.tpu.current_stream() == stream


def test_the_current_stream_is_one_of_the_thread():
    seen = []
    with torch.tpu.Stream():
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.tpu.default_stream()]


def test_results_cross_streams():
    a, b = torch.tpu.Stream(), torch.tpu.Stream()
    with torch.tpu.stream(a):
        x = work()
        done = a.record_event()
    with torch.tpu.stream(b):
        b.wait_event(done)
        b.wait_stream(a)
        done.wait(b)
        x.record_stream(b)
        y = x + 1
    b.synchronize()
    assert b.query()
    torch.testing.assert_close(y.cpu(), torch.full((256, 256), 2.0))


def test_an_event_is_done_when_the_work_before_it_is():
    event = torch.tpu.Event()
    assert event.query()  # as CUDA: not recorded yet
    event.synchronize()
    x = work()
    event.record()
    event.synchronize()
    assert event.query()
    event.record(torch.tpu.Stream())
    torch.tpu.synchronize()
    assert event.query()
    assert event.device == x.device


def test_elapsed_time():
    marks = [torch.tpu.Event(enable_timing=True) for _ in range(3)]
    for mark in marks:
        work()
        mark.record()
    marks[-1].synchronize()
    first, second, both = (marks[i].elapsed_time(marks[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert min(first, second) >= 0
    assert both < 60_000  # milliseconds
    assert math.isclose(first + second, both, abs_tol=1e-3)


def test_elapsed_time_wants_timing_and_records():
    timed, plain = torch.tpu.Event(enable_timing=True), torch.tpu.Event()
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.tpu.Event(enable_timing=True))
    plain.record()
    timed.record()
    timed.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(plain)


def test_an_event_is_recorded_again():
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    start.record()
    end.record()
    start.record()
    torch.tpu.synchronize()
    assert start.elapsed_time(end) <= 0


def test_an_event_belongs_to_its_device():
    event = torch.tpu.Event(device=1)
    event.record(torch.tpu.Stream(device=1))
    with pytest.raises(RuntimeError, match="does not match"):
        event.record(torch.tpu.Stream(device=0))


def test_synchronize_of_each_kind():
    x = work()
    torch.tpu.synchronize()
    torch.tpu.synchronize("tpu:1")
    torch.tpu.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert torch.tpu.current_stream().query()
    assert x.isfinite().all()


def test_synchronize_from_many_threads():
    failed = []

    def run() -> None:
        for _ in range(20):
            event = (torch.ones(8, device="tpu") + 1).device and torch.tpu.current_stream().record_event()
            event.synchronize()
            torch.tpu.synchronize()
            if not event.query():
                failed.append(event)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
