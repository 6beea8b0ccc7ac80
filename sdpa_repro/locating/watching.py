"""Hooks and wrapped functions that note what passes through a model, and are gone afterwards."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from sdpa_repro.capturing.caller import Callers
from sdpa_repro.locating import structure
from sdpa_repro.locating.calls import note_mask
from sdpa_repro.locating.notes import TOKEN_TYPES, Notes, first_tensor, flat_features
from sdpa_repro.locating.structure import Stack
from sdpa_repro.visibility import visible_values

CALLER = "(caller)"
"""Among the arguments by name: path of the module that calls the function."""
Look = Callable[[Mapping[str, Any], Any], None]
"""Gets the arguments by name and the result of a function; only looks."""


def watch_model(stack: ExitStack, notes: Notes, model: Any, stacks: Sequence[Stack]) -> None:
    """Note every stage outside the SDPA calls; what was attached is detached when `stack` closes."""
    owners = [one.owner for one in stacks]
    for path in dict.fromkeys(above for owner in owners for above in _down_to(owner)):
        _entry(stack, notes, model, path, is_owner=path in owners)
    for path, module in structure.rotary(model):
        _rotary(stack, notes, path, module)
    for path, module in structure.position_tables(model):
        _table(stack, notes, path, module)
    for path in dict.fromkeys(above for owner in owners for above in _down_to(owner)):
        _image(stack, notes, path, model.get_submodule(path))
    _functions(stack, notes, model)
    for one in stacks:
        for path, layer in one.layers.items():
            _layer(stack, notes, path, layer, one.owner, one.kinds[path])


def watch_inside(stack: ExitStack, notes: Notes, model: Any, path: str) -> None:
    """Note the outputs of all modules below the layer `path`, under the stage "inside"."""
    for name, module in model.get_submodule(path).named_modules(prefix=path):
        if name == path:
            continue

        def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            found = first_tensor(output)
            axes = {2: (-2, None), 3: (-2, -3), 4: (-3, -4)}  # (tokens, D), (B, L, D), (B, L, H, E)
            axis, batch = axes.get(found.dim() if found is not None else 0, (None, None))
            # tokens that experts sorted among themselves cannot be compared
            if found is not None and notes.along(found, axis):
                notes.add("inside", name, found, axis=axis, batch=batch, layer=path)

        stack.callback(module.register_forward_hook(careful(notes, after)).remove)


def careful(notes: Notes, look: Callable[..., Any]) -> Callable[..., Any]:
    """`look`, except that what goes wrong in it is noted and never the model's to meet."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return look(*args, **kwargs)
        except Exception as error:
            notes.problems.append(f"{type(error).__name__}: {error}"[:200])
            return None

    return guarded


def feed_layers(
    stack: ExitStack, notes: Notes, stacks: Sequence[Stack], inputs: Mapping[str, Sequence[Tensor]]
) -> None:
    """Give each layer other hidden states for the noted row: `inputs` by path, one (1, valid tokens, width) a pass.

    A model may run through a layer several times (ALBERT does). A layer whose input is of another shape, or that is
    run through more often than there are inputs, goes on as it is.
    """
    passes = {path: iter(each) for path, each in inputs.items()}

    def before(module: nn.Module, args: Any, kwargs: Any, path: str) -> Any:
        values = next(passes[path], None)
        name = "hidden_states" if isinstance(kwargs.get("hidden_states"), Tensor) else None
        place = next((index for index, each in enumerate(args) if isinstance(each, Tensor)), None)
        if values is None or (name is None and place is None):
            return None
        hidden = kwargs[name] if name is not None else args[place]
        fed = notes.put(hidden, values)
        if name is not None:
            return args, {**kwargs, name: fed}
        return tuple(fed if index == place else each for index, each in enumerate(args)), kwargs

    for one in stacks:
        for path, layer in one.layers.items():
            if path in inputs:
                hook = careful(notes, functools.partial(before, path=path))
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


def wrap(stack: ExitStack, notes: Notes, home: Any, name: str, look: Look) -> None:
    """Replace the function `name` of a module (Python's or torch's) by itself followed by `look`."""
    original, callers = getattr(home, name), Callers()
    own = vars(home).get(name, wrap)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        frame = sys._getframe(1)
        careful(notes, lambda: look({**_named(original, args, kwargs), CALLER: callers.name(frame)}, result))()
        return result

    object.__setattr__(home, name, wrapper)
    stack.callback(
        (lambda: object.__delattr__(home, name)) if own is wrap else (lambda: object.__setattr__(home, name, own))
    )


def _entry(stack: ExitStack, notes: Notes, model: Any, path: str, *, is_owner: bool) -> None:
    """What a module above the layers is given: ids, mask, token types, positions, and embeddings if it is the last."""
    module = model.get_submodule(path)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        named = _named(module.forward, args, kwargs)
        for name, value in named.items():
            if isinstance(value, Tensor) and (stage := notes.stage_of(name, value)) not in ("", "pixel inputs"):
                notes.add(stage, path, value, axis=-1, batch=-2, maker=structure.parent(path))
        if is_owner:
            mask = named.get("attention_mask")
            given = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
            notes.mask_makers[path] = structure.parent(path) if given else path
        if is_owner and isinstance(named.get("inputs_embeds"), Tensor):
            notes.add("embeddings", path, named["inputs_embeds"], axis=-2, batch=-3, maker=structure.parent(path))

    stack.callback(module.register_forward_pre_hook(careful(notes, before), with_kwargs=True).remove)
    table = _embedding(module) if is_owner else None
    if table is not None:

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                notes.add("token embeddings", path, output, axis=-2, batch=-3)

        stack.callback(table.register_forward_hook(careful(notes, after)).remove)


def _rotary(stack: ExitStack, notes: Notes, path: str, module: nn.Module) -> None:
    """The positions that a rotary embedding is asked for, and its cosines and sines."""

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        named = _named(module.forward, args, kwargs)
        kind = named.get("layer_type")
        positions = named.get("position_ids")
        if isinstance(positions, Tensor):
            notes.add("position_ids", path, positions, axis=-1, batch=-2, maker=structure.parent(path))
        if isinstance(output, (tuple, list)):
            for name, tensor in zip(("cos", "sin"), output, strict=False):
                part = f"{name} of {kind}" if kind else name
                if isinstance(tensor, Tensor):
                    notes.add("rotary", path, tensor, axis=-2, batch=-3, part=part)

    stack.callback(module.register_forward_hook(careful(notes, after), with_kwargs=True).remove)


def _table(stack: ExitStack, notes: Notes, path: str, module: nn.Module) -> None:
    """The positions that a table of learned positions is asked for, and what it answers."""

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        named = _named(module.forward, args, kwargs)
        positions = named.get("position_ids", named.get("input") if type(module) is nn.Embedding else None)
        if isinstance(positions, Tensor) and not positions.dtype.is_floating_point:
            notes.add("position_ids", path, positions, axis=-1, batch=-2, maker=structure.parent(path))
        if isinstance(output, Tensor):
            notes.add("rotary", path, output, axis=-2, batch=-3, part="learned positions")

    stack.callback(module.register_forward_hook(careful(notes, after), with_kwargs=True).remove)


def _image(stack: ExitStack, notes: Notes, path: str, module: nn.Module) -> None:
    """Projected image features and the places that they go to."""

    def features(_: Mapping[str, Any], result: Any) -> None:
        flat = flat_features(result)
        if flat is not None:
            notes.add("image features", path, flat, axis=None)

    def places(_: Mapping[str, Any], result: Any) -> None:
        for index, mask in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(mask, Tensor):
                flat = mask[..., 0] if mask.dim() == 3 else mask
                notes.image_tokens = notes.image_tokens or flat.sum(-1).tolist()
                notes.add("placeholder mask", path, flat, axis=-1, batch=-2, part=str(index))

    for name, look in (("get_image_features", features), ("get_placeholder_mask", places)):
        if callable(getattr(module, name, None)):
            wrap(stack, notes, module, name, look)


def _functions(stack: ExitStack, notes: Notes, model: Any) -> None:
    """Functions outside modules that are given token types or block ids."""

    def types(named: Mapping[str, Any], _: Any, name: str) -> None:
        for word in TOKEN_TYPES:
            if isinstance(named.get(word), Tensor):
                notes.add("token types", name, named[word], axis=-1, batch=-2, maker=named[CALLER])

    def blocks(named: Mapping[str, Any], _: Any) -> None:
        ids = named.get("block_sequence_ids")
        if isinstance(ids, Tensor):
            trimmed = ids.narrow(-1, 0, notes.total) if ids.shape[-1] > notes.total else ids
            notes.add("image block ids", "blockwise_overlay", trimmed, axis=-1, batch=-2, maker=named[CALLER])

    for home in structure.modelling_modules(model):
        for name, function in list(vars(home).items()):
            if not inspect.isfunction(function):
                continue
            if name == "blockwise_overlay":
                wrap(stack, notes, home, name, blocks)
            elif set(TOKEN_TYPES) & set(inspect.signature(function).parameters):
                wrap(stack, notes, home, name, functools.partial(types, name=name))


def _layer(stack: ExitStack, notes: Notes, path: str, layer: nn.Module, owner: str, kind: str) -> None:
    """A layer's input and output, its positions, and the mask it is given."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        named = _named(module.forward, args, kwargs)
        found = first_tensor([named.get("hidden_states"), *named.values()])
        if found is not None:
            notes.add("input", path, found, axis=-2, batch=-3, layer=path, maker=owner)
        positions = named.get("position_ids")
        if isinstance(positions, Tensor):
            notes.add("position_ids", path, positions, axis=-1, batch=-2, maker=owner)
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            plane = notes.one_row(mask, -4)[0, 0]
            visible = notes.square(visible_values(plane))
            if visible is not None:
                note_mask(notes, visible, path, path, kind, notes.mask_makers.get(owner, owner))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        found = first_tensor(output)
        if found is not None:
            notes.add("output", path, found, axis=-2, batch=-3, layer=path)

    stack.callback(layer.register_forward_pre_hook(careful(notes, before), with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(careful(notes, after)).remove)


def _named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the function's parameters; what has no name of its own is left out."""
    names = [name for name, each in inspect.signature(function).parameters.items() if each.kind in _POSITIONAL]
    names += [f"argument {index}" for index in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _embedding(module: nn.Module) -> nn.Module | None:
    """The module's own table of token embeddings."""
    try:
        found = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _down_to(path: str) -> list[str]:
    """The module itself and all above it, from the model ("") down."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
