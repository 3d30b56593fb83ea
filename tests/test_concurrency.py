"""Threads that dispatch at once: right results, one compile a program, no crash.

A race is provoked by a barrier, never by waiting for a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torch_tpu import config
from torch_tpu.runtime import extension

THREADS = 4
EACH = 2_000


def together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run ``work(n)`` in every thread at the same time. Raises what a thread raised."""
    barrier = threading.Barrier(threads)
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            barrier.wait()
            work(n)
        except BaseException as e:  # noqa: BLE001  (a thread must not take its error to the grave)
            errors.append(e)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if errors:
        raise errors[0]


def test_each_thread_computes_its_own():
    def chain(device: str, n: int, each: int) -> torch.Tensor:
        x = torch.full((4, 4), float(n), device=device)
        for i in range(each // 4):
            x = x * 0.5 + i % 7
            x[i % 4].add_(1)
            x = x.clamp(max=9 + n)
        return x.cpu()

    wanted = [chain("cpu", n, EACH) for n in range(THREADS)]

    def work(n: int) -> None:
        torch.testing.assert_close(chain("tpu", n, EACH), wanted[n])

    together(work)


def test_in_place_on_own_tensors():
    def work(n: int) -> None:
        x = torch.zeros(64, device="tpu")
        for i in range(EACH):
            x.add_(n) if i % 2 else x[:32].add_(1)
        assert x[40].item() == n * EACH // 2
        assert x[3].item() == n * EACH // 2 + EACH // 2

    together(work)


@pytest.mark.parametrize("shape", [(3, 11), (5, 13), (7, 17)])
def test_a_new_program_is_made_once(shape):
    x = torch.ones(shape, device="tpu")
    torch.accelerator.synchronize()
    extension.clear_cache()
    before = extension.cache_stats()
    results: list[torch.Tensor] = []
    together(lambda n: results.append(x.logaddexp(x)), threads=8)
    after = extension.cache_stats()
    assert after["misses"] - before["misses"] == 1
    assert after["programs"] - before["programs"] == 1
    for r in results:
        torch.testing.assert_close(r.cpu(), torch.ones(shape).logaddexp(torch.ones(shape)))


def test_new_programs_of_many_threads():
    def work(n: int) -> None:
        for i in range(1, 12):
            x = torch.full((i, n + 1), 2.0, device="tpu")
            assert x.mul(x).sum().item() == 4 * i * (n + 1)

    together(work)


def test_an_error_reaches_every_thread_that_asked():
    a, b = torch.ones(3, 5, device="tpu"), torch.ones(3, 4, device="tpu")

    def work(n: int) -> None:
        for _ in range(20):
            with pytest.raises(RuntimeError, match="must match|broadcast"):
                a + b

    together(work)
    assert (a + a).sum().item() == 30


def test_reads_of_a_tensor_that_another_thread_writes():
    x = torch.zeros(1000, device="tpu")

    def work(n: int) -> None:
        if n == 0:
            for _ in range(EACH):
                x.add_(1)
            return
        last = 0.0
        for i in range(EACH // 8):
            seen = x.cpu() if i % 2 else (x + 0).cpu()
            assert seen.min() == seen.max()  # a snapshot, never half of a write
            assert seen[0].item() >= last
            last = seen[0].item()

    together(work)
    assert x.eq(EACH).all().item()


def test_writers_of_one_tensor_lose_no_window():
    x = torch.zeros(THREADS, 50, device="tpu")

    def work(n: int) -> None:
        for _ in range(EACH // 4):
            x[n].add_(1)

    together(work)
    assert x.cpu().eq(EACH // 4).all()


def test_clones_of_a_tensor_that_is_written():
    x = torch.zeros(200, device="tpu")

    def work(n: int) -> None:
        for _ in range(EACH // 4):
            if n == 0:
                x.add_(1)
            else:
                y = x.clone()
                y.mul_(2)
                seen = y.cpu()
                assert seen.min() == seen.max()

    together(work)
    assert x.eq(EACH // 4).all().item()


def test_random_numbers_are_drawn_once_each():
    torch.tpu.manual_seed(5)
    wanted = torch.rand(THREADS * 100, 4, device="tpu").cpu()
    torch.tpu.manual_seed(5)
    drawn: list[torch.Tensor] = []
    together(lambda n: drawn.extend(torch.rand(4, device="tpu") for _ in range(100)))
    got = torch.stack([t.cpu() for t in drawn])
    assert torch.equal(got[got[:, 0].argsort()], wanted[wanted[:, 0].argsort()])


def test_backward_in_every_thread():
    def work(n: int) -> None:
        w = torch.nn.Parameter(torch.full((8, 8), 0.5, device="tpu"))
        for _ in range(20):
            w.grad = None
            (w @ w).sum().backward()
        assert w.grad.eq(8).all().item()

    together(work)


def test_eviction_while_others_run():
    extension.clear_cache()
    extension.set_max_programs(16)
    try:

        def work(n: int) -> None:
            for i in range(40):
                x = torch.ones(n + 1, i % 10 + 1, device="tpu")
                assert x.add(x).sum().item() == 2 * x.numel()

        together(work)
        assert extension.cache_stats()["programs"] <= 16
    finally:
        extension.set_max_programs(config.MAX_PROGRAMS.value)
