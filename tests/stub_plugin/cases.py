"""What can go wrong below us, one function a case. Runs in a process whose plugin is the stub: see tests/test_faults.py.

As a program it reads names of cases from stdin and answers each with a line: JSON, the traceback or "".
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from torch_tpu.runtime import extension

INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 13, 8, 12  # PJRT_Error_Code

stub = ctypes.CDLL(os.environ["TORCH_TPU_PLUGIN"])
FAULTS = ("compile", "deserialize", "execute", "event", "host_buffer")

CASES: list[Callable[[], None]] = []


def case(fn: Callable[[], None]) -> Callable[[], None]:
    CASES.append(fn)
    return fn


def reset() -> None:
    for fault in FAULTS:
        getattr(stub, f"stub_fail_{fault}")(0, 0)
    stub.stub_release()
    gc.collect()  # tracebacks hold tensors
    for _ in range(2):  # the first one raises what the case left behind
        try:
            torch.tpu.synchronize()
        except RuntimeError:
            continue


@contextmanager
def released_by_another_thread(after: Callable[[], bool]) -> Iterator[None]:
    """Within the block, another thread lets the held launches complete as soon as ``after()`` is true."""

    def release() -> None:
        while not after():
            os.sched_yield()
        stub.stub_release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def ones(*shape: int) -> torch.Tensor:
    """Ones that no program made."""
    return torch.ones(*shape).to("tpu")


# ---- failures at the launch


@case
def execution_error_comes_at_the_first_read() -> None:
    a = ones(3)
    (a * 2).cpu()
    stub.stub_fail_execute(1, INTERNAL)
    b = a * 2
    assert b.shape == (3,)  # metadata is there
    for read in (b.cpu, b.tolist, b[0].item, lambda: repr(b), lambda: b.to("cpu", torch.float64)):
        with pytest.raises(RuntimeError, match=r"\[aten\.mul\.\w+\] .*stub: the program did not start[\s\S]*TPU-E203"):
            read()
    assert a.tolist() == [1, 1, 1]  # others are as they were
    assert (a * 2).tolist() == [2, 2, 2]


@case
def execution_error_comes_at_synchronize_once() -> None:
    a = ones(3)
    stub.stub_fail_execute(1, INTERNAL)
    b = a * 3
    with pytest.raises(RuntimeError, match=r"\[aten\.mul\.\w+\] .*TPU-E203|TPU-E203") as caught:
        torch.tpu.synchronize()
    assert "[aten.mul." in str(caught.value)
    torch.tpu.synchronize()
    with pytest.raises(RuntimeError, match="TPU-E203"):
        b.cpu()


@case
def what_reads_a_failed_tensor_names_the_first_op() -> None:
    a = ones(3)
    stub.stub_fail_execute(1, INTERNAL)
    b = a * 4
    c = (b + 1).exp()
    with pytest.raises(RuntimeError, match=r"\[aten\.mul\."):
        c.cpu()
    rows = torch.split(b, [1, 2])
    with pytest.raises(RuntimeError, match=r"\[aten\.mul\."):
        rows[1].cpu()


@case
def failed_in_place_op_poisons_only_its_storage() -> None:
    base, other = ones(4), ones(4)
    view = base[1:3]
    (base + 1).cpu()
    stub.stub_fail_execute(1, INTERNAL)
    assert base.add_(1) is base
    for read in (base.cpu, view.cpu):
        with pytest.raises(RuntimeError, match=r"\[aten\.add_\."):
            read()
    assert other.add_(1).tolist() == [2, 2, 2, 2]


@case
def failed_write_through_a_view_poisons_its_base() -> None:
    base = ones(4, 4)
    stub.stub_fail_execute(1, INTERNAL)
    base[1].mul_(5)
    with pytest.raises(RuntimeError, match=r"\[aten\.mul_\."):
        base.cpu()


@case
def in_place_op_on_a_failed_input_fails_its_target() -> None:
    a, target = ones(3), ones(3)
    stub.stub_fail_execute(1, INTERNAL)
    b = a * 6
    target.add_(b)  # must not keep the old value as if nothing had happened
    with pytest.raises(RuntimeError, match=r"\[aten\.mul\."):
        target.cpu()


@case
def failed_tensor_is_usable_after_a_full_write() -> None:
    a = ones(3)
    stub.stub_fail_execute(1, INTERNAL)
    a.mul_(7)
    a.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert a.tolist() == [1, 2, 3]
    stub.stub_fail_execute(1, INTERNAL)
    a.mul_(7)
    a.fill_(2)
    assert a.tolist() == [2, 2, 2]


@case
def failed_out_argument() -> None:
    a, out = ones(3), torch.empty(3, device="tpu")
    stub.stub_fail_execute(1, INTERNAL)
    torch.mul(a, 8, out=out)
    with pytest.raises(RuntimeError, match=r"\[aten\.mul\.out\]"):
        out.cpu()
    torch.mul(a, 8, out=out)
    assert out.tolist() == [8, 8, 8]


@case
def data_dependent_op_fails_at_the_call() -> None:
    a = torch.tensor([0.0, 1.0, 2.0]).to("tpu")
    a.nonzero()
    stub.stub_fail_execute(1, INTERNAL)
    with pytest.raises(RuntimeError, match=r"\[aten\.nonzero\.default\]"):
        a.nonzero()
    assert a.nonzero().tolist() == [[1], [2]]


@case
def backward_through_a_failed_launch() -> None:
    w = ones(3).requires_grad_()
    loss = (w * 9).sum()
    loss.backward()
    stub.stub_fail_execute(1, INTERNAL)
    (w * 9).sum().backward()
    with pytest.raises(RuntimeError, match=r"TPU-E203"):
        torch.tpu.synchronize()
    w.grad = None
    (w * 9).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [9, 9, 9]


# ---- failures that come later


@case
def asynchronous_error_comes_at_the_read_and_names_the_op() -> None:
    a = ones(3)
    stub.stub_hold()
    stub.stub_fail_event(1, INTERNAL)
    b = a * 11
    assert not torch.accelerator.current_stream().query()
    stub.stub_release()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\[aten\.mul\.\w+\] .*stub: the program failed while it ran"):
            b.cpu()
    assert a.tolist() == [1, 1, 1]


@case
def asynchronous_error_comes_at_synchronize() -> None:
    a = ones(3)
    stub.stub_hold()
    stub.stub_fail_event(2, INTERNAL)
    (a * 12, a + 12, a - 12)
    stub.stub_release()
    with pytest.raises(RuntimeError, match=r"\[aten\.add\."):
        torch.tpu.synchronize()
    torch.tpu.synchronize()


@case
def asynchronous_error_in_place() -> None:
    a, b = ones(3), ones(3)
    stub.stub_fail_event(1, INTERNAL)
    a.add_(13)
    b.add_(13)
    with pytest.raises(RuntimeError, match=r"\[aten\.add_\."):
        a.cpu()
    with pytest.raises(RuntimeError, match="TPU-E203"):
        (a + 1).cpu()
    assert b.tolist() == [14, 14, 14]


@case
def asynchronous_out_of_memory() -> None:
    a = ones(3)
    stub.stub_fail_event(1, RESOURCE_EXHAUSTED)
    b = a * 14
    with pytest.raises(torch.OutOfMemoryError, match=r"\[aten\.mul\.\w+\] [\s\S]*TPU-E304"):
        b.cpu()


# ---- memory


def ooms() -> int:
    return torch.tpu.memory_stats()["num_ooms"]


@case
def out_of_memory_of_a_launch_raises_at_the_call() -> None:
    a = ones(64)
    (a * 15).cpu()
    before, held = ooms(), torch.tpu.memory_allocated()
    stub.stub_fail_executes(1, RESOURCE_EXHAUSTED, 2)
    table = r"Tensors hold 0\.0 MiB in \d+ arrays:[\s\S]*1 x tpu:0 float32\[64\]"
    with pytest.raises(torch.OutOfMemoryError, match=rf"\[aten\.mul\.\w+\] [\s\S]*{table}[\s\S]*Fix: [\s\S]*TPU-E304"):
        a * 15
    assert ooms() == before + 1
    assert torch.tpu.memory_allocated() == held
    assert (a * 15).sum().item() == 15 * 64
    torch.tpu.synchronize()  # was raised already


@case
def out_of_memory_waits_for_what_runs_and_tries_again() -> None:
    a = ones(64)
    (a * 15.5).cpu()
    before = ooms()
    stub.stub_fail_execute(1, RESOURCE_EXHAUSTED)
    assert (a * 15.5).sum().item() == 15.5 * 64
    stub.stub_fail_host_buffer(1, RESOURCE_EXHAUSTED)
    assert ones(64).sum().item() == 64
    assert ooms() == before
    torch.tpu.synchronize()


@case
def out_of_memory_of_a_transfer_raises_at_the_call() -> None:
    before, held = ooms(), torch.tpu.memory_allocated()
    stub.stub_fail_host_buffers(1, RESOURCE_EXHAUSTED, 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"256 bytes[\s\S]*TPU-E304"):
        ones(64)
    assert ooms() == before + 1
    assert torch.tpu.memory_allocated() == held
    assert ones(64).sum().item() == 64


@case
def out_of_memory_of_operands_leaves_the_target_as_it_was() -> None:
    a = ones(3)
    a.mul_(1.5)
    stub.stub_fail_host_buffers(1, RESOURCE_EXHAUSTED, 2)
    with pytest.raises(torch.OutOfMemoryError):
        a.mul_(16.25)  # the operand is new, so it has to be transferred
    assert a.tolist() == [1.5, 1.5, 1.5]
    assert a.mul_(2).tolist() == [3, 3, 3]


@case
def out_of_memory_of_a_compile() -> None:
    a = ones(3, 17)
    stub.stub_fail_compile(1, RESOURCE_EXHAUSTED)
    with pytest.raises(torch.OutOfMemoryError, match=r"\[aten\.mul\.\w+\] [\s\S]*TPU-E304"):
        a * 17
    assert (a * 17).sum().item() == 3 * 17 * 17


@case
def nothing_is_lost_after_many_failures() -> None:
    a = ones(256)
    (a * 18).cpu()
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated()
    for code in (INTERNAL, RESOURCE_EXHAUSTED) * 50:
        stub.stub_fail_executes(1, code, 2 if code == RESOURCE_EXHAUSTED else 1)
        try:
            (a * 18).cpu()
        except RuntimeError:
            continue
    assert torch.tpu.memory_allocated() == held


# ---- compilation


@case
def compile_error_names_the_op() -> None:
    a = ones(3, 19)
    stub.stub_fail_compile(1, UNIMPLEMENTED)
    with pytest.raises(
        RuntimeError, match=r"\[aten\.exp\.default\] [\s\S]*stub: the program was refused[\s\S]*TPU-E104"
    ):
        a.exp()
    assert a.exp().shape == (3, 19)


@case
def compile_error_leaves_the_target_as_it_was() -> None:
    a = ones(3, 20)
    stub.stub_fail_compile(1, INTERNAL)
    with pytest.raises(RuntimeError, match=r"\[aten\.exp_\.default\]"):
        a.exp_()
    assert a.sum().item() == 60


@case
def every_waiter_of_a_failed_compile_gets_an_answer() -> None:
    a = ones(3, 21)
    stub.stub_fail_compile(1, INTERNAL)
    barrier = threading.Barrier(4)
    answers: list[float | str] = []

    def work() -> None:
        barrier.wait()
        try:
            answers.append(a.tanh().sum().item())
        except RuntimeError as e:
            answers.append(str(e))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(isinstance(x, str) for x in answers) == 1
    assert len(answers) == 4


@case
def program_from_disk_that_the_plugin_refuses_is_compiled() -> None:
    a = ones(3, 22)
    expected = a.sin().cpu()
    extension.clear_cache()
    before = extension.cache_stats()
    assert torch.equal(a.sin().cpu(), expected)
    assert extension.cache_stats()["loaded"] == before["loaded"] + 1  # it is on disk
    extension.clear_cache()
    before = extension.cache_stats()
    stub.stub_fail_deserialize(1, INTERNAL)
    assert torch.equal(a.sin().cpu(), expected)
    assert extension.cache_stats()["compiled"] == before["compiled"] + 1


# ---- events and streams while work is pending


@case
def event_is_pending_until_the_work_is_done() -> None:
    a = ones(3)
    (a * 23).cpu()
    torch.tpu.synchronize()
    done = torch.Event("tpu")
    done.record()
    assert done.query()
    stub.stub_hold()
    b = a * 23
    assert done.query()  # recorded before
    pending = torch.Event("tpu")
    pending.record()
    assert not pending.query()
    assert not torch.accelerator.current_stream().query()
    stub.stub_release()
    assert pending.query()
    assert torch.accelerator.current_stream().query()
    assert b.tolist() == [23, 23, 23]


@case
def synchronize_waits() -> None:
    a = ones(3)
    for wait in (torch.tpu.synchronize, torch.accelerator.current_stream().synchronize, (a * 24).cpu):
        stub.stub_hold()
        event = torch.Event("tpu")
        b = a * 24
        event.record()
        entered = threading.Event()
        with released_by_another_thread(entered.is_set):
            assert not event.query()
            entered.set()
            wait()
            event.synchronize()
            assert event.query()
        assert b.tolist() == [24, 24, 24]


@case
def reads_and_event_synchronize_wait() -> None:
    a = ones(3)
    for wait in ("event", "cpu", "item"):
        stub.stub_hold()
        event = torch.Event("tpu")
        b = a * 25
        event.record()
        entered = threading.Event()
        with released_by_another_thread(entered.is_set):
            entered.set()
            if wait == "event":
                event.synchronize()
            elif wait == "cpu":
                assert b.cpu().tolist() == [25, 25, 25]
            else:
                assert b[1].item() == 25
            event.synchronize()  # a result may be there just before the launch counts as done
            assert event.query()


@case
def python_runs_on_while_a_thread_waits() -> None:
    a = ones(3)
    stub.stub_hold()
    b = a * 26
    waiting = threading.Thread(target=torch.tpu.synchronize)
    waiting.start()
    c = a * 26  # launches go on, and marks still see the work that the other thread waits for
    event = torch.Event("tpu")
    event.record()
    assert not event.query()
    assert waiting.is_alive()
    stub.stub_release()
    waiting.join()
    event.synchronize()
    assert torch.equal(b.cpu(), c.cpu())


@case
def marks_come_in_the_order_of_the_work() -> None:
    a = ones(3)
    stub.stub_hold()
    events = []
    for _ in range(3):
        a.add_(27)
        events.append(torch.Event("tpu", enable_timing=True))
        events[-1].record()
    assert [e.query() for e in events] == [False] * 3
    with pytest.raises(RuntimeError, match="completed"):
        events[0].elapsed_time(events[2])
    stub.stub_release()
    torch.tpu.synchronize()
    assert [e.query() for e in events] == [True] * 3
    assert 0 <= events[0].elapsed_time(events[1]) <= events[0].elapsed_time(events[2])


@case
def a_failed_launch_completes_its_events() -> None:
    a = ones(3)
    stub.stub_hold()
    stub.stub_fail_event(1, INTERNAL)
    a.mul_(28)
    event = torch.Event("tpu")
    event.record()
    stub.stub_release()
    event.synchronize()
    assert event.query()
    with pytest.raises(RuntimeError, match=r"\[aten\.mul_\."):
        torch.tpu.synchronize()


@case
def many_pending_launches_are_bounded() -> None:
    a = ones(3)
    (a + 29).cpu()
    stub.stub_hold()
    entered = threading.Event()
    with released_by_another_thread(entered.is_set):
        for i in range(200):
            if i == 50:
                entered.set()  # from here on the queue may fill up and wait
            a += 29
    assert a.tolist() == [1 + 200 * 29] * 3


def serve() -> None:
    """Run the cases that stdin names; one line of answer each."""
    answers, sys.stdout = sys.stdout, sys.stderr
    cases = {fn.__name__: fn for fn in CASES}
    for line in sys.stdin:
        try:
            cases[line.strip()]()
            error = ""
        except BaseException:  # noqa: BLE001  (the answer is for the other process)
            error = traceback.format_exc()
        reset()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    serve()
