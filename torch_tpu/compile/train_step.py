"""A training step (forward, loss, backward, optimizer) as one program.

`torch.compile` ends a graph where an optimizer's step begins: its wrapper asks for that, and optimizers are objects that
dynamo does not trace. So the step is compiled with a plain object in the optimizer's place, which shares its state and
its parameter groups and has its update, without the wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def _plain(optimizer: torch.optim.Optimizer) -> Any:
    """What ``optimizer`` computes, as an object that is no Optimizer: same state, same groups."""
    methods: dict[str, Any] = {}
    for cls in reversed(type(optimizer).__mro__[:-1]):
        methods |= {k: inspect.unwrap(v) for k, v in vars(cls).items() if inspect.isfunction(v) and k[:2] != "__"}
    plain = type(f"Plain{type(optimizer).__name__}", (), methods)()
    plain.__dict__.update({k: optimizer.__dict__[k] for k in ("state", "param_groups", "defaults")})
    return plain


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """What changes from step to step becomes a tensor, so that it is an operand of the program."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"])
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(p.device)


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    before_update: Callable[[], Any] | None = None,
    **compile_options: Any,
) -> Callable[..., Any]:
    """A function that trains one step a call, compiled into one program.

        step = train_step(lambda x, y: F.cross_entropy(model(x), y), optimizer)
        for x, y in data:
            loss = step(x, y)

    The first call runs eagerly, because an optimizer makes its state in its first step. Parameters, buffers and the
    optimizer's state are updated in place, in their own memory; gradients exist inside the program only, and
    ``p.grad`` is None afterwards. The optimizer is made ``capturable`` and its learning rate a tensor, so a scheduler's
    new rate does not recompile; `state_dict` works as before.

    Args:
        loss_fn: gets what the step is called with; returns the loss (a scalar tensor), or a tuple with the loss first.
        optimizer: of ``torch.optim``, or of a class that overrides ``step`` in the same way. Its hooks do not run.
        before_update: runs between backward and update, inside the program: clip or change ``p.grad`` there.
        compile_options: for `torch.compile`, for example ``dynamic=True``.

    Returns:
        A callable that returns what ``loss_fn`` does, detached. It raises torch._dynamo.exc.Unsupported if the step
        cannot be one graph; the message says where it would break.
    """
    plain = _plain(optimizer)

    def run(update: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = loss_fn(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if before_update is not None:
            before_update()
        with torch.no_grad():
            update()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def one_graph(*args: Any, **kwargs: Any) -> Any:
        return run(plain.step, *args, **kwargs)

    compiled = torch.compile(one_graph, backend="tpu", fullgraph=True, **compile_options)
    started = False

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        if not started:
            result = run(optimizer.step, *args, **kwargs)
            _make_capturable(optimizer)
            started = True
            return result
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(*args, **kwargs)

    return step
