"""Eager modes: how an op runs, and switching between them.

Strict launches each op at once; work on the device is asynchronous. Debug waits for each op, so that an error is raised
by the line that made it, and checks indices. Fused records ops and runs them as one program when a value is needed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tpu import _C


class EagerMode(enum.Enum):
    """How eager ops run. Members have two names; the long ones are those of other TPU backends."""

    STRICT = 0
    DEBUG = 1
    FUSED = 2
    DEFER_NEVER = STRICT
    DEFER_NEVER_AND_LAUNCH_BLOCKING = DEBUG
    DEFER_AND_FUSE = FUSED
    INTERNAL_DEFER_ALL = DEFER_AND_FUSE


def current() -> EagerMode:
    """The mode of the calling thread: that of the innermost :func:`set_eager_mode` block, else the process's."""
    return EagerMode(_C.eager_mode())


def set_process(mode: EagerMode) -> None:
    """Use ``mode`` in all threads that are in no :func:`set_eager_mode` block. Runs what is recorded first."""
    mode = EagerMode(mode)
    if mode is EagerMode.FUSED:
        _flush_after_steps()
    _C.set_process_mode(mode.value)


@contextlib.contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Use ``mode`` in this thread inside the block, and in backward passes that start there.

    What is recorded runs where the block begins and ends.

    Raises:
        ValueError: ``mode`` is no :class:`EagerMode`.
    """
    mode = EagerMode(mode)
    if mode is EagerMode.FUSED:
        _flush_after_steps()
    before = _C.thread_mode()
    _C.set_thread_mode(mode.value)
    try:
        yield
    finally:
        _C.set_thread_mode(before)


def flush() -> None:
    """Start what fused mode has recorded, on all devices; does not wait for it."""
    _C.flush_step()


def deferred_stats() -> dict[str, Any]:
    """What fused mode did in this process.

    Returns:
        ``recorded`` ops, ``launched`` programs, ``dead_values`` that never existed on the device, and ``flushes`` by
        reason: a value was ``read``; ``synchronize``; an ``event``; an optimizer ``step`` ended; the stretch
        ``repeat``-ed itself, or had too many ``nodes`` or ``bytes``; the ``mode`` changed.
    """
    return dict(_C.deferred_stats())


@functools.cache
def _flush_after_steps() -> None:
    # Not in a step that dynamo traces: it would cut the graph there.
    register_optimizer_step_post_hook(lambda *_: None if torch.compiler.is_compiling() else flush())
