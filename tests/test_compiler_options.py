"""Options of XLA: for a block (torch.tpu.compiler) and for a compiled graph (options=)."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_tpu.errors import CompileOptionUnknown
from torch_tpu.runtime import compiler, disk_cache, extension, modes

OPTION = "xla_cpu_enable_fast_math"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def misses() -> int:
    return extension.cache_stats()["misses"]


def new(fn) -> int:
    """Programs that ``fn`` needs and that were not there."""
    before = misses()
    fn()
    return misses() - before


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 7, device="tpu")


def test_a_block_makes_programs_of_its_own(x) -> None:
    def op():
        torch.atan2(x, x)

    op()
    with torch.tpu.compiler.custom_compiler_options({OPTION: "true"}):
        assert new(op) == 1
        assert new(op) == 0
    assert new(op) == 0
    with torch.tpu.compiler.custom_compiler_options({OPTION: True}):
        assert new(op) == 0


def test_blocks_nest() -> None:
    block = torch.tpu.compiler.custom_compiler_options
    with block({OPTION: True, "xla_optimization_level": "O1"}):
        with block({OPTION: False}):
            assert dict(compiler.current()) == {OPTION: "false", "xla_optimization_level": "O1"}
        assert dict(compiler.current())[OPTION] == "true"
    assert compiler.current() == ()
    assert compiler.serialized() == b""


def test_a_block_ends_with_an_error() -> None:
    with pytest.raises(KeyError), torch.tpu.compiler.custom_compiler_options({OPTION: True}):
        raise KeyError
    assert compiler.current() == ()


def test_the_compiler_gets_them() -> None:
    with torch.tpu.compiler.custom_compiler_options({OPTION: True, "xla_optimization_level": "O3"}):
        sent = compiler.serialized()
    assert OPTION.encode() in sent
    assert b"xla_allow_excess_precision" in sent
    assert b"xla_optimization_level" not in sent  # a field of its own: 24, with the value 39
    assert bytes([0xC0, 0x01, 39]) in sent


def test_levels(x) -> None:
    with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1", "xla_memory_fitting_level": "O2"}):
        torch.testing.assert_close((x * 3).cpu(), x.cpu() * 3)
    with pytest.raises(CompileOptionUnknown, match="O0, O1, O2 and O3, not 'O4'"):
        torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O4"})


def test_unknown_options_and_values() -> None:
    with pytest.raises(CompileOptionUnknown, match=r"(?s)no option 'xla_nonsense'.*TPU-E105"):
        torch.tpu.compiler.custom_compiler_options({"xla_nonsense": "1"})
    with pytest.raises(CompileOptionUnknown, match="refuses"):
        torch.tpu.compiler.custom_compiler_options({OPTION: "perhaps"})


def test_other_threads_have_their_own() -> None:
    seen = []
    with torch.tpu.compiler.custom_compiler_options({OPTION: True}):
        thread = threading.Thread(target=lambda: seen.append(compiler.current()))
        thread.start()
        thread.join()
    assert seen == [()]


def test_the_backward_of_a_block_too() -> None:
    x = torch.randn(5, 3, device="tpu", requires_grad=True)
    x.erf().sum().backward()
    with torch.tpu.compiler.custom_compiler_options({OPTION: True}):
        y = x.erf().sum()
        before = misses()
        y.backward()
        assert misses() > before


def test_the_disk_cache_tells_them_apart(x) -> None:
    def stores() -> int:
        return disk_cache.counts.hits + disk_cache.counts.stores

    def op():
        torch.logaddexp(x, x[:1]).cpu()

    op()
    extension.clear_cache()
    compiled = extension.cache_stats()["compiled"]
    op()
    assert extension.cache_stats()["compiled"] == compiled
    extension.clear_cache()
    with torch.tpu.compiler.custom_compiler_options({"xla_cpu_prefer_vector_width": 128}):
        op()
        with torch.tpu.compiler.custom_compiler_options({"xla_cpu_prefer_vector_width": 256}):
            plans = {compiler.serialized()}
    assert extension.cache_stats()["compiled"] + extension.cache_stats()["loaded"] > compiled
    assert plans != {b""}


def test_fused_mode(x) -> None:
    with modes.set_eager_mode(modes.EagerMode.FUSED):
        y = x * 2
        with torch.tpu.compiler.custom_compiler_options({OPTION: True}):
            z = y + 1
        torch.testing.assert_close((z * y).cpu(), (x.cpu() * 2 + 1) * (x.cpu() * 2))


# ---- torch.compile


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="tpu", fullgraph=True, options=options)


def test_options_of_a_graph(x) -> None:
    seen = []

    def serialized():
        seen.append(dict(compiler.current()))
        return real()

    real, compiler.serialized = compiler.serialized, serialized
    try:
        y = x.clone().requires_grad_()
        compiled(lambda t: t.sin().exp().sum(), **{OPTION: True})(y).backward()
    finally:
        compiler.serialized = real
    assert {OPTION: "true"} in seen
    assert seen.count({OPTION: "true"}) >= 2  # forward and backward
    torch.testing.assert_close(y.grad.cpu(), x.cpu().cos() * x.cpu().sin().exp(), rtol=1e-3, atol=1e-4)
    assert compiler.current() == ()


def test_options_of_a_graph_and_of_a_block(x) -> None:
    fn = compiled(lambda t: t.cos() + 1, **{OPTION: False})
    fn(x)
    with torch.tpu.compiler.custom_compiler_options({OPTION: True}):
        assert new(lambda: fn(x)) == 0  # those of the graph win
    with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1"}):
        assert new(lambda: fn(x)) == 1


def test_unknown_option_of_a_graph(x) -> None:
    with pytest.raises(Exception, match="no option 'xla_nonsense'"):
        compiled(lambda t: t + 1, xla_nonsense=1)(x)


def test_async_compile_warms_up_every_size() -> None:
    fn = torch.compile(lambda x: (x @ x.mT).tanh(), backend="tpu", dynamic=False)
    inputs = [(torch.ones(n, 3, device="tpu"),) for n in (2, 3, 4, 5)]
    results = [f.result() for f in torch.tpu.compiler.async_compile(fn, inputs)]
    before = extension.cache_stats()["misses"]
    with torch.no_grad():
        again = [fn(x) for (x,) in inputs]
    assert extension.cache_stats()["misses"] == before
    for want, got in zip(again, results, strict=True):
        assert torch.equal(want, got)


def test_async_compile_raises_at_result() -> None:
    def fail(x):
        raise ValueError("no such model")

    (future,) = torch.tpu.compiler.async_compile(fail, [(1,)])
    with pytest.raises(ValueError, match="no such model"):
        future.result()
