"""Cut of any timm network into a frozen trunk and a tail.

A network's units are its children, and the members of containers such as `blocks`. They are recorded in the order in
which `forward_features` calls them; the tail begins at the last stage. What trunk and tail compute is compared with
what timm computes, so that no network is ever cut wrongly. A network that cannot be cut is frozen whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.model.trunk import AdapterTail, ClassTokenTail, ConvTail, Layout, PooledTail, Tail, TrunkParts

# Children whose members are stages or blocks. `layer4` and the like are units themselves.
_CONTAINERS = ("blocks", "stages", "layers", "features", "levels", "network", "body")
_MIN_TAIL_SHARE = 0.02  # of the weights; a smaller tail takes in the units before it
_PARTS_SIDE = 4  # of the grid of parts that a network frozen whole is pooled to
_TOLERANCE = 1e-4  # relative to the largest feature
_SHAKE = 0.2


class CannotCutError(Exception):
    """The network does not compute what its units compute one after the other."""


def cut_network(network: Any, *, resolution: int, adapter: bool = False) -> TrunkParts:
    """Cut a timm network for images of `resolution` px; freeze it whole if `adapter` is set or it cannot be cut."""
    network = _without_chance(network.eval())
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, resolution, resolution, generator=generator) - 0.5
    with torch.no_grad():
        if not adapter:
            # A foreign network may raise anything where its units do not fit together.
            with suppress(Exception), _shaken(network, generator):
                return _cut(network, images)
        return _frozen_whole(network, images)


@contextmanager
def _shaken(network: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Change all weights that are initialised to one value, and restore them afterwards.

    New networks scale their blocks by 1e-5 or 0 and add zeros: what a block gets would not show in a comparison.
    """
    tensors = [*network.parameters(), *network.buffers()]
    constant = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.unique().numel() == 1]
    kept = [tensor.clone() for tensor in constant]
    for tensor in constant:
        tensor += (torch.rand(tensor.shape, generator=generator) - 0.5) * 2 * _SHAKE
    try:
        yield
    finally:
        for tensor, value in zip(constant, kept, strict=True):
            tensor.copy_(value)


def _without_chance(network: Any) -> Any:
    """Turn dropout and stochastic depth off: a resumed run must compute what an uninterrupted one does."""
    for module in network.modules():
        for rate in ("p", "drop_prob", "drop_rate", "attn_drop_p"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return network


def _cut(network: Any, images: Tensor) -> TrunkParts:
    calls, recorded = _record(network, images[:1])
    start = _start_of_tail(calls)
    stages = nn.Sequential(*(call.unit() for call in calls[start:]))
    frozen = _front(network, calls, start, images[:1], recorded)
    # Another number of images: what a unit was given beside its input must not depend on them.
    maps, features = frozen(images), network.forward_features(images)
    _check_same(stages(maps), features)
    pool, layout = _pooling(network, features, _layout(network, features))
    tail, dim = _tail(stages, pool, layout, maps)
    cut = f"trained from {calls[start].name} on" + (", pooled by the mean" * isinstance(pool, MeanOf))
    return TrunkParts(network, frozen, tail, dim, cut=cut)


@dataclass(frozen=True)
class _Call:
    """Call of a unit: its input, and what it was given beside it (a rotary embedding, the size of the map)."""

    name: str
    module: nn.Module
    given: Tensor
    beside: dict[str, Any]

    def unit(self) -> nn.Module:
        """Return the unit as a module of its input alone."""
        return WithConstants(self.module, self.beside) if self.beside else self.module

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.module.parameters())


def _record(network: Any, images: Tensor) -> tuple[list[_Call], Tensor]:
    """Return the calls of the units in `forward_features`, and its result."""
    calls: list[_Call] = []
    hooks = []
    for name, module in _units(network).items():

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            given, *_ = bound.values()
            beside = dict(list(bound.items())[1:])
            beside |= beside.pop("kwargs", {})
            calls.append(_Call(name, module, given, beside))

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        features = network.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    if len({call.name for call in calls}) < len(calls) or not isinstance(features, Tensor):
        raise CannotCutError
    return calls, features


def _units(network: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a network by name, and instead of a container its members."""
    units: dict[str, nn.Module] = {}
    for name, child in network.named_children():
        if name in _CONTAINERS and isinstance(child, nn.Sequential | nn.ModuleList):
            units |= {f"{name}.{member}": module for member, module in child.named_children()}
        else:
            units[name] = child
    return units


def _start_of_tail(calls: list[_Call]) -> int:
    """Return the position of the last stage: the last member of a container, or the last unit with enough weights."""
    members = [position for position, call in enumerate(calls) if call.name.partition(".")[0] in _CONTAINERS]
    start, least = members[-1] if members else len(calls) - 1, _MIN_TAIL_SHARE * sum(call.weights for call in calls)
    while start > 0 and sum(call.weights for call in calls[start:]) < least:
        start -= 1
    if start == 0:
        raise CannotCutError
    return start


def _front(network: nn.Module, calls: list[_Call], start: int, images: Tensor, features: Tensor) -> nn.Module:
    """Return the frozen part: its units in a row, or where more than that happens, the network without later units."""
    try:
        row = nn.Sequential(*(call.unit() for call in calls[:start]))
        _check_same(row(images), calls[start].given)
        return row
    except (CannotCutError, TypeError, ValueError, RuntimeError, AttributeError):
        later = [call.name for call in calls[start:]]
        return FeaturesOf(_without(network, [*later, *_called_by_head(network, features)]))


class WithConstants(nn.Module):
    """Unit with constants beside its input."""

    def __init__(self, module: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._plain = {name: value for name, value in constants.items() if not isinstance(value, Tensor)}
        self._tensors = [name for name in constants if name not in self._plain]
        for name in self._tensors:
            self.register_buffer(f"constant_{name}", constants[name].detach(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Call the unit."""
        tensors = {name: getattr(self, f"constant_{name}") for name in self._tensors}
        return self.module(features, **self._plain, **tensors)


class FeaturesOf(nn.Module):
    """`forward_features` of a timm network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's features."""
        return self.network.forward_features(images)


class HeadOf(nn.Module):
    """`forward_head` of a timm network up to its classifier: pooling, and the layers after it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, features: Tensor) -> Tensor:
        """Return the pooled features [B, d]."""
        return self.network.forward_head(features, pre_logits=True)


class MeanOf(nn.Module):
    """Mean of the locations of a map or of the patch tokens."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, features: Tensor) -> Tensor:
        """Return the mean [B, d]."""
        return self.layout.to_map(features).mean(dim=(2, 3))


class Skip(nn.Module):
    """Place of a unit that is left out."""

    def forward(self, features: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the input."""
        return features


def _without(network: nn.Module, names: list[str]) -> nn.Module:
    """Return a copy of the network that shares its weights and leaves some units out."""
    rest = copy(network)
    rest._modules = dict(network._modules)
    for name in names:
        child, _, member = name.partition(".")
        if member:
            container: Any = copy(rest._modules[child])
            container._modules = {**container._modules, member: Skip()}
            rest._modules[child] = container
        else:
            rest._modules[child] = Skip()
    return rest


def _head_alone(network: Any, features: Tensor) -> HeadOf:
    """Return the head without anything that it does not call."""
    called = _called_by_head(network, features)
    rest = _without(network, [name for name in network._modules if name not in called])
    rest._parameters, rest._buffers = {}, {}
    return HeadOf(rest)


def _called_by_head(network: Any, features: Tensor) -> list[str]:
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: called.append(name))
        for name, module in network.named_children()
    ]
    try:
        network.forward_head(features, pre_logits=True)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _tail(stages: nn.Sequential, pool: nn.Module, layout: Layout, maps: Tensor) -> tuple[Tail, int]:
    """Return the simplest tail that computes what timm computes, and the width of its embedding."""
    tail = PooledTail(stages, pool, layout)
    found = tail(maps)
    tail.signed = any(bool((features < 0).any()) for features in found)
    dim, expected = found.embedding.shape[1], [torch.relu(features) for features in found]
    simpler: Tail | None = None
    if layout.kind == "NCHW":
        simpler = ConvTail(*stages)
    elif layout.kind == "NLC" and len(stages) == 2:
        simpler = ClassTokenTail(stages[0], stages[1], layout)
    try:
        if simpler is not None:
            for got, wanted in zip(simpler(maps), expected, strict=True):
                _check_same(got, wanted)
            return simpler, dim
    except (CannotCutError, AttributeError, TypeError, RuntimeError):  # blocks or a pooling of another kind
        pass
    return tail, dim


def _layout(network: Any, features: Tensor) -> Layout:
    """Return the layout of the network's features."""
    channels, shape = network.num_features, features.shape
    if features.dim() == 4 and channels == shape[1]:
        return Layout("NCHW", (shape[2], shape[3]))
    if features.dim() == 4 and channels == shape[3]:
        return Layout("NHWC", (shape[1], shape[2]))
    if features.dim() == 3 and channels == shape[2]:
        prefix = getattr(network, "num_prefix_tokens", 0)
        side = isqrt(shape[1] - prefix)
        grid = getattr(getattr(network, "patch_embed", None), "grid_size", None) or (side, side)
        if prod(grid) == shape[1] - prefix:
            return Layout("NLC", (grid[0], grid[1]), prefix)
    raise CannotCutError


def _pooling(network: Any, features: Tensor, layout: Layout) -> tuple[nn.Module, Layout]:
    """Return the network's own pooling, or the mean where parts cannot be brought into the space of the embedding."""
    pool = _head_alone(network, features)
    embedding = network.forward_head(features, pre_logits=True)
    channels = layout.to_map(features).shape[1]
    has_layers = any(True for _ in pool.parameters())
    if embedding.dim() == 2 and embedding.shape[1] == channels and (layout.kind == "NLC" or not has_layers):
        return pool, layout
    if embedding.dim() == 2 and layout.kind != "NLC":
        each = replace(layout, pool_each=True)
        try:
            parts = PooledTail(nn.Sequential(), pool, each).parts(features)
            if parts.shape == (len(features), embedding.shape[1], *layout.grid):
                return pool, each
        except (RuntimeError, ValueError, AssertionError, IndexError):  # a pooling that needs the whole map
            pass
    return MeanOf(layout), layout


def _frozen_whole(network: Any, images: Tensor) -> TrunkParts:
    frozen = WholeNetwork(network, _layout_of_parts(network, images))
    dim = frozen(images).shape[2]
    tail = AdapterTail(dim, Layout("NLC", frozen.grid, prefix=1))
    return TrunkParts(network, frozen, tail, dim, cut="frozen whole, with a trained adapter")


def _layout_of_parts(network: Any, images: Tensor) -> Layout | None:
    """Return the layout of features that can be brought into the space of the embedding, or None."""
    try:
        features = network.forward_features(images)
        pool, layout = _pooling(network, features, _layout(network, features))
    except Exception:  # features of another kind
        return None
    return layout if isinstance(pool, HeadOf) else None


class WholeNetwork(nn.Module):
    """Network that is frozen whole: its embedding and at most 4 x 4 pooled parts, as tokens [B, 1 + h*w, d]."""

    def __init__(self, network: Any, layout: Layout | None) -> None:
        super().__init__()
        self.network, self.layout = network, layout
        height, width = layout.grid if layout else (1, 1)
        self.grid = min(height, _PARTS_SIDE), min(width, _PARTS_SIDE)

    def forward(self, images: Tensor) -> Tensor:
        """Return the embedding as first token, then the parts; without parts, the embedding again."""
        features = self.network.forward_features(images)
        embedding = self.network.forward_head(features, pre_logits=True).flatten(1)
        if self.layout is None:
            return torch.stack([embedding, embedding], dim=1)
        parts = PooledTail(nn.Sequential(), HeadOf(self.network), self.layout).parts(features)
        pooled = F.adaptive_avg_pool2d(parts, self.grid)
        return torch.cat([embedding.unsqueeze(1), pooled.flatten(2).transpose(1, 2)], dim=1)


def _check_same(found: Tensor, expected: Tensor) -> None:
    # Written so that what is not a number is not the same.
    if found.shape != expected.shape or not (found - expected).abs().max() <= _TOLERANCE * expected.abs().max():
        raise CannotCutError
