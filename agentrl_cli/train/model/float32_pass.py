"""Forward passes in float32 of a model that computes in another type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """A block in which ``model`` computes in float32, from the weights that it has.

    They are widened module by module, while each computes: a whole copy may have no room, and a
    sharded model gathers its weights layer by layer.
    """
    own: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def widen(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        own[module] = dict(module._parameters)
        wide = {name: _to_float32(parameter) for name, parameter in own[module].items()}
        module._parameters.update(wide)
        return tree_map(_to_float32, args), tree_map(_to_float32, kwargs)

    def restore(module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters.update(own.pop(module))

    with ExitStack() as stack:
        # Compiled layers are compiled for the type that they were called with.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if module._parameters:
                for handle in (
                    module.register_forward_pre_hook(widen, with_kwargs=True),
                    # Before hooks that shard the weights again, after those that gather them.
                    module.register_forward_hook(restore, prepend=True, always_call=True),
                ):
                    stack.callback(handle.remove)
        yield


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
