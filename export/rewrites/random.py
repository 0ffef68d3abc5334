"""Refuses random operators, and drops checks that a file cannot make.

A random operator would become the same numbers at every call, or numbers that no reference can be
compared with. A check of values (``_assert_async``) has no form in LiteRT; the export of a model
says in a note that it does not check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.errors import LoweringError
from tpu2edge.export import blame

__all__ = ["drop_checks", "fill_empty", "refuse"]

aten = torch.ops.aten

_NAMES = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "normal",
        "normal_",
        "normal_functional",
        "uniform",
        "uniform_",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "exponential",
        "exponential_",
        "poisson",
        "geometric",
        "geometric_",
        "cauchy",
        "cauchy_",
        "log_normal",
        "log_normal_",
        "random",
        "random_",
        "binomial",
        "_standard_gamma",
        "_sample_dirichlet",
        "native_dropout",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
    ]
)
# Random only when the argument `training` (or `train`) is true and `p` is above 0.
_TRAINING = frozenset(
    [
        "dropout",
        "dropout_",
        "feature_dropout",
        "feature_dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "rrelu",
        "rrelu_",
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "rrelu_with_noise_functional",
    ]
)
_CHECKS = (
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_functional_assert_async",
)


def refuse(program: ExportedProgram) -> int:
    """Refuse a program whose results depend on random numbers.

    Raises:
        LoweringError: it does; the place is the line that makes them.
    """
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        name = _name(node)
        if name in _NAMES or (name in _TRAINING and _is_training(node, name)) or _drops(node, name):
            if name.startswith("fractional"):
                raise LoweringError(
                    f"{name} chooses its windows at random at every call",
                    do="use max pooling with fixed windows in the exported model",
                    place=blame.place_of_node(node),
                )
            raise LoweringError(
                f"{name} makes random numbers, which would be the same at every call of a LiteRT "
                "file or could not be checked",
                do="pass the noise as an input of the model, or switch it off (eval mode, "
                "training=False) before exporting",
                place=blame.place_of_node(node),
            )
    return 0


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if node.op == "call_function" and schema else ""


def _given(node: Node, name: str, default: Any) -> Any:
    for index, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name == name:
            if index < len(node.args):
                return node.args[index]
            return node.kwargs.get(name, spec.default_value)
    return default


def _is_training(node: Node, name: str) -> bool:
    training = _given(node, "train", None)
    if training is None:
        training = _given(node, "training", False)
    return bool(training) and _given(node, "p", 1.0) != 0


def _drops(node: Node, name: str) -> bool:
    return "attention" in name and float(_given(node, "dropout_p", 0.0) or 0.0) > 0


def drop_checks(program: ExportedProgram) -> int:
    """Remove checks of values; gives their number."""
    count = 0
    for node in list(program.graph.nodes):
        if _name(node) in _CHECKS:
            first = node.args[0] if node.args else None
            if node.users:
                # The functional form gives a token that the next check takes.
                node.replace_all_uses_with(node.args[-1])  # type: ignore[arg-type]
            program.graph.erase_node(node)
            count += isinstance(first, Node)
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def fill_empty(program: ExportedProgram) -> int:
    """Zeros for ``empty`` whose values are written before they are read, as far as can be seen.

    Raises:
        LoweringError: the values of uninitialised memory are used.
    """
    count = 0
    for node in list(program.graph.nodes):
        if _name(node) not in (
            "empty",
            "empty_like",
            "new_empty",
            "empty_strided",
            "empty_permuted",
        ):
            continue
        if node.users and not any(_writes(user) for user in node.users):
            raise LoweringError(
                f"{_name(node)} is used without being written to: its values are whatever the "
                "memory held",
                do="use zeros, or write the whole tensor before reading it",
                place=blame.place_of_node(node),
            )
        value = node.meta["val"]
        if all(isinstance(size, int) for size in value.shape):
            with program.graph.inserting_before(node):
                new = program.graph.call_function(
                    aten.zeros.default, (list(value.shape),), {"dtype": value.dtype}
                )
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            program.graph.erase_node(node)
            count += 1
    if count:
        program.graph_module.recompile()
    return count


_VIEWS = frozenset(
    [
        "select",
        "slice",
        "view",
        "reshape",
        "narrow",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "diagonal",
        "t",
        "view_as_real",
        "view_as_complex",
        "alias",
        "split",
        "chunk",
        "unbind",
        "unflatten",
        "flatten",
    ]
)


def _writes(user: Node) -> bool:
    """Whether the use is a write, or a view that something is written through."""
    schema = getattr(user.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    name = _name(user)
    if name.endswith(("_scatter", "copy", "fill", "zero", "scatter", "index_put")):
        return True
    if name in _VIEWS or "getitem" in str(user.target):
        return any(_writes(one) for one in user.users)
    # Only its shape and type are looked at.
    return name.endswith("_like")
