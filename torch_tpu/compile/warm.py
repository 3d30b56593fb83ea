"""What AOTAutograd made of a dynamo graph, on disk: a process that has seen the graph neither traces nor partitions it.

PyTorch's AOTAutogradCache decides what can be kept, evaluates the guards and puts the wrappers around what it loads. Two
things of it are replaced while the backend runs. Its key: Inductor's part would hash all sources of torch and import code
generators (half a second); ours is the digest of our sources, of the build and of the machine. Its files: entries are
those of the disk cache, with a checksum, so that a damaged one is a miss.

    dynamo graph ──key──► .aot entry ── hit ──► Artifacts ──► plans and executables, on disk too (modes/stored.py)
                              └─miss: AOTAutograd traces, partitions; Artifacts of the graphs are kept

An entry holds the text of a program; its graph, which only a miss of the plan reads, is a pickle inside of the pickle.

Not kept: graphs with ops or tensor classes that are not torch's (their code is in no key), with tensors as attributes,
and whatever AOTAutogradCache refuses. One entry a graph: among traces that differ only in guards the last stays.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config as inductor_config
from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache
from torch._inductor.output_code import OutputCode
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx._graph_pickler import GraphPickler, Options
from torch.utils._python_dispatch import _disable_current_modes

from torch_tpu import config
from torch_tpu.compile import graph
from torch_tpu.modes import stored
from torch_tpu.runtime import compiler, disk_cache

_OWN_TYPES = (FakeTensor, torch.Tensor, torch.nn.Parameter)
_NO_PICKLE = (pickle.PicklingError, BypassFxGraphCache, TypeError, AttributeError, NotImplementedError, AssertionError)


class Artifact(OutputCode):
    """A compiled graph that can be kept: its `graph.Program`, if it is one, and the graph for what must be lowered."""

    def __init__(self, gm: GraphModule, kind: str, consumed: Collection[int], options: compiler.Options) -> None:
        super().__init__()
        self.kind = kind
        self.options = options
        self.consumed = tuple(consumed)
        self.program = graph.as_program(gm, kind, consumed)
        self.gm: GraphModule | None = gm
        self.pickled = b""
        self._boxed_call = True  # AOTAutograd: takes one list, and empties it
        self._start(gm)

    def _start(self, gm: GraphModule | None, load: Callable[[], GraphModule] | None = None) -> None:
        if self.program is not None:
            call = graph.start(self.program, gm, load)
        else:
            loaded = gm if load is None else load()
            assert loaded is not None
            call = graph.compile_graph(loaded, self.kind, consumed=self.consumed)
        self.call = graph.with_options(call, self.options)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.call(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Become what is kept. Raises BypassAOTAutogradCache if the graph holds what cannot be pickled."""
        with _disable_current_modes():
            self._pack()

    def _pack(self) -> None:
        assert self.gm is not None
        if any(n.target is with_effects for n in self.gm.graph.nodes):
            raise BypassAOTAutogradCache("an op with effects: the cache of PyTorch does not pass its token on")
        try:
            self.pickled = GraphPickler.dumps(self.gm, Options(None, lambda key: key == "val"))
        except _NO_PICKLE as e:
            raise BypassAOTAutogradCache(f"a graph that cannot be pickled: {e}") from e
        if self.program is not None:
            self.devices = [t.device for t in self.program.constants]
            self.program = replace(self.program, constants=[t.cpu() for t in self.program.constants])
        self.gm = None
        del self.call

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Become callable again, after a load."""
        fake_mode = detect_fake_mode(example_inputs)
        if self.program is not None:
            constants = [t.to(device) for t, device in zip(self.program.constants, self.devices, strict=True)]
            self.program = replace(self.program, constants=constants)

        def load() -> GraphModule:
            graph.load_rules()
            gm = GraphPickler.loads(self.pickled, fake_mode)  # type: ignore[arg-type]
            assert isinstance(gm, GraphModule)
            return gm

        self._start(None, load)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


# ---- the key


def _check(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raises BypassAOTAutogradCache for a graph whose trace depends on code that is in no key."""
    for x in example_inputs:
        if isinstance(x, torch.Tensor) and type(x) not in _OWN_TYPES and not type(x).__module__.startswith("torch."):
            raise BypassAOTAutogradCache(f"an input of class {type(x).__name__}")
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), torch.Tensor):
                raise BypassAOTAutogradCache(f"the graph holds the tensor {node.target}")
            if isinstance(node.target, torch._ops.OpOverload) and not is_builtin(node.target):
                raise BypassAOTAutogradCache(f"the custom op {node.target}")
            if isinstance(node.target, torch._ops.OpOverloadPacket):
                raise BypassAOTAutogradCache(f"the op {node.target} without an overload")


class _Details(autograd_cache.AOTAutogradCacheDetails):
    """What a trace depends on; Inductor's part of it replaced by ours."""

    def __init__(self, options: compiler.Options, *args: Any, **kwargs: Any) -> None:
        self.options = options
        super().__init__(*args, **kwargs)

    def _init_fx_graph_hash_details(self, gm: GraphModule, example_inputs: Sequence[Any], fx_config: Any) -> None:
        _check(gm, example_inputs)
        try:
            FxGraphCache._check_can_cache(gm, example_inputs, fx_config)
        except BypassFxGraphCache as e:
            raise BypassAOTAutogradCache(str(e)) from e
        self.gm = gm
        self.example_inputs = list(example_inputs)
        self.defaults = (torch.get_default_dtype(), str(torch.get_default_device()))
        # Read by the partitioner.
        self.inductor_config = inductor_config.save_config_portable(ignore_private_configs=False, readonly_values=True)
        self.build = (stored.rules_digest(), disk_cache.build_fingerprint())


# ---- the store


def _name(key: str) -> str:
    return disk_cache.digest(key) + ".aot"


def _candidates(local: bool, remote_cache: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
    data = disk_cache.load(_name(key))
    if data is not None:
        yield pickle.loads(data), data, True


def _keep(key: str, content: bytes) -> None:
    disk_cache.store(_name(key), content)


# ---- the backend's part


def active() -> bool:
    """Whether traces are kept: there is a disk cache, our sources are those that this process read, and nobody wants to
    see the graphs."""
    wanted = functorch_config.enable_autograd_cache and config.DUMP_DIR.value is None
    return wanted and disk_cache.enabled() and bool(stored.rules_digest())


_INHERITED = object()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """PyTorch has no way to say these, so its attribute is ours within the block."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def cache(options: compiler.Options) -> Iterator[Callable[[Any], Any]]:
    """Within it, AOTAutogradCache is ours; dynamo's lock makes that one thread. Gives the wrapper of a compiler.

    Args:
        options: of XLA, for this graph.
    """
    if not active():
        yield lambda compiler: compiler
        return
    with (
        # Artifacts in the entry; the backward is compiled with the forward, and kept with it.
        functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
        _replaced(autograd_cache, "AOTAutogradCacheDetails", partial(_Details, options)),
        _replaced(AOTAutogradCache, "iterate_over_candidates", staticmethod(_candidates)),
        _replaced(AOTAutogradCache, "_write_to_local_cache", staticmethod(_keep)),
    ):
        yield lambda compiler: SerializableAOTDispatchCompiler(Artifact, compiler)
