"""``torch.tpu.compiler``: options of XLA for the programs that a block of code, or a compiled graph, makes.

A set of options has a number. The number in force is a thread-local value of the extension and part of every program
key; what the set means goes to the plugin's compiler with each program, and into the key of the disk cache.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.errors import CompileOptionUnknown

__all__ = ["async_compile", "custom_compiler_options"]

Options = tuple[tuple[str, str], ...]

_LEVELS = ("xla_optimization_level", "xla_memory_fitting_level")
_sets: list[Options] = [()]
_lock = threading.Lock()  # guards _sets; nothing is taken under it


def _text(value: str | bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def normalized(options: Mapping[str, str | bool | float]) -> Options:
    """``options`` in order, as the compiler takes them.

    Raises:
        CompileOptionUnknown: the plugin's compiler has no such option, or does not take the value.

    The first time for these options, compiles an empty program: some milliseconds, and the client is created.
    """
    found = tuple(sorted((name, _text(value)) for name, value in options.items()))
    _check(found)
    return found


@functools.cache
def _check(options: Options) -> None:
    for name, value in options:
        if name in _LEVELS and value not in ("O0", "O1", "O2", "O3"):
            raise CompileOptionUnknown(f"the option {name!r} is one of O0, O1, O2 and O3, not {value!r}.")
    error = _C.compile_options_error({name: value for name, value in options if name not in _LEVELS})
    if not error:
        return
    unknown = re.search(r"No such compile option: '(.*?)'", error)
    raise CompileOptionUnknown(
        f"the compiler has no option {unknown[1]!r}." if unknown else f"the compiler refuses {dict(options)}: {error}",
        hint="use options of XLA that this plugin knows, such as xla_allow_excess_precision or xla_optimization_level.",
    )


@functools.cache
def _merged(outer: int, options: Options) -> int:
    """Number of set ``outer`` with ``options`` on top."""
    found = tuple(sorted({**dict(_sets[outer]), **dict(options)}.items()))
    with _lock:
        if found not in _sets:
            _sets.append(found)
        return _sets.index(found)


@contextlib.contextmanager
def in_force(options: Options) -> Iterator[None]:
    """As `custom_compiler_options`, for options that were `normalized` before."""
    outer = _C.compiler_options()
    _C.set_compiler_options(_merged(outer, options))
    try:
        yield
    finally:
        _C.set_compiler_options(outer)


def custom_compiler_options(options: Mapping[str, str | bool | float]) -> contextlib.AbstractContextManager[None]:
    """Context manager: what this thread compiles within the block, eager ops and graphs, gets these options of XLA.

    Nested blocks add to each other, the inner one wins. Programs with other options are other programs: a call that was
    compiled outside is compiled again inside, once. In fused mode, entering and leaving run what is recorded.

    Args:
        options: names and values as in XLA_FLAGS, without dashes. Besides these, ``xla_optimization_level`` and
            ``xla_memory_fitting_level`` are O0, O1, O2 or O3.

    Raises:
        CompileOptionUnknown: the plugin's compiler has no such option, or does not take the value.
    """
    return in_force(normalized(options))


def async_compile(
    fn: Callable[..., Any], warmup_inputs: Iterable[tuple[Any, ...]], *, no_grad: bool = True, workers: int = 8
) -> list[Future[Any]]:
    """Compile ``fn`` for several inputs at once, in the background.

        done = torch.tpu.compiler.async_compile(model, [(torch.zeros(n, 128, device="tpu"),) for n in (1, 2, 4, 8)])
        ...
        for f in done: f.result()   # waits, raises what went wrong

    ``fn``, a compiled function or eager code, runs once with each of ``warmup_inputs`` in a thread of its own: tracing
    takes turns, XLA compiles side by side. It must be safe to run from several threads; what it writes is written.

    Args:
        fn: what to warm up.
        warmup_inputs: positional arguments of each call.
        no_grad: whether the calls run under `torch.no_grad`, as inference does.
        workers: how many calls run at a time.

    Returns:
        A future for each of ``warmup_inputs``, in their order, with what ``fn`` returned.
    """

    def call(args: tuple[Any, ...]) -> Any:
        with in_force(options), torch.set_grad_enabled(not no_grad):
            return fn(*args)

    options = current()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="torch_tpu-compile")
    futures = [pool.submit(call, args) for args in warmup_inputs]
    pool.shutdown(wait=False)
    return futures


def current(number: int | None = None) -> Options:
    """The set in force in this thread, or the one with ``number``."""
    return _sets[_C.compiler_options() if number is None else number]


def serialized() -> bytes:
    """The options in force in this thread, with the defaults, as PJRT takes them; empty if there are none."""
    options = current()
    return bytes(_C.compile_options(dict(options))) if options else b""
