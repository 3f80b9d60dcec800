"""Trees in and out, by optree."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
import torch
from common import grad, vjp
from torch import Tensor

import fcoll
from fcoll.testing import Substrate, check_adjoint


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    weight: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any
    parts: Any = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: Any


dataclass: Any = optree.dataclasses.dataclass  # mypy takes these for the standard ones
static: Any = optree.dataclasses.field


@dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Registered:
    weight: Any
    rate: float = static(pytree_node=False, default=0.5)


def a() -> Tensor:
    return torch.tensor([1.0, 2.0])


TREES: dict[str, Any] = {
    "leaf": a(),
    "dict": {"b": a(), "a": {"c": a()}},
    "ordered dict": collections.OrderedDict(b=a(), a=a()),
    "default dict": collections.defaultdict(list, b=a(), a=[a()]),
    "deque": collections.deque([a(), a()], maxlen=3),
    "list": [a(), [a(), []]],
    "tuple": (a(), (), (a(),)),
    "named tuple": Pair(a(), Pair(None, a())),
    "dataclass": Plain(a(), {"x": a()}),
    "dataclass with None": Plain(a()),
    "frozen dataclass": Frozen(a(), [a(), Plain(a())]),
    "dataclass with slots": Slotted(a()),
    "None": None,
    "nothing": {},
    "None inside": [None, a(), {"k": None}],
    "torch's own": torch.max(torch.ones(2, 2), 0),
}


def kinds(tree: Any) -> Any:
    """The types of all nodes, and the order of keys."""
    if isinstance(tree, dict):
        return type(tree), [(key, kinds(value)) for key, value in tree.items()]
    if dataclasses.is_dataclass(tree):
        return type(tree), [kinds(getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, (list, tuple, collections.deque)):
        return type(tree), [kinds(value) for value in tree]
    return type(tree)


def leaves(tree: Any) -> list[Tensor]:
    if tree is None:
        return []
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in leaves(value)]
    if dataclasses.is_dataclass(tree):
        return [x for field in dataclasses.fields(tree) for x in leaves(getattr(tree, field.name))]
    return [x for value in tree for x in leaves(value)]


def scaled(tree: Any, group: Any) -> Any:
    return fcoll.all_reduce(tree, group)


@pytest.mark.parametrize("name", TREES)
def test_structure_is_kept(name: str) -> None:
    tree = TREES[name]
    got = fcoll.vmap(lambda: scaled(tree, "i"), axis_name="i", axis_size=3, out_dims=None)()
    assert kinds(got) == kinds(tree)
    for mine, x in zip(leaves(got), leaves(tree), strict=True):
        torch.testing.assert_close(mine, 3 * x)


def test_structure_is_kept_on_processes(substrate: Substrate) -> None:
    def f(group: Any) -> Any:
        out = {}
        for name, tree in TREES.items():
            got = scaled(tree, group)
            assert kinds(got) == kinds(tree), name
            out[name] = leaves(got)
        return out

    n = substrate.n
    stack = torch.zeros(n)
    got = substrate.map(lambda group, _: f(group), stack)
    for name, tree in TREES.items():
        for mine, x in zip(got[name], leaves(tree), strict=True):
            torch.testing.assert_close(mine, (n * x).expand_as(mine))


def test_structure_is_kept_when_compiled() -> None:
    trees = {name: tree for name, tree in TREES.items() if name not in ("nothing", "None inside")}  # see below

    def f(trees: Any) -> Any:
        return fcoll.all_reduce(trees, ())

    got = torch.compile(f, fullgraph=True, backend="eager")(trees)
    assert kinds(got) == kinds(trees)
    torch.testing.assert_close(leaves(got), leaves(trees))


@pytest.mark.parametrize("tree", [{}, {"k": None}])
def test_a_dict_without_tensors_is_torchs_limit(tree: Any) -> None:
    """Dynamo cannot trace optree's flattening of one, with or without a collective."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match="DictMetaData"):
        torch.compile(lambda x, t: (x, optree.tree_flatten(t)[0]), fullgraph=True, backend="eager")(torch.ones(1), tree)


def test_a_dataclass_is_first_seen_by_a_compiled_function() -> None:
    @dataclasses.dataclass
    class New:
        x: Any

    def f(tree: Any) -> Any:
        return fcoll.all_reduce([New(tree[1].x + 1), *fcoll.all_reduce(tree, ())], ())

    got = torch.compile(f, fullgraph=True, backend="eager")([a(), New(a())])
    assert kinds(got) == (list, [(New, [Tensor]), Tensor, (New, [Tensor])])


def test_a_dataclass_may_be_in_a_tree_twice() -> None:
    @dataclasses.dataclass
    class Twice:
        x: Any

    got = fcoll.all_reduce([Twice(a()), Twice(a())], ())
    assert kinds(got) == (list, [(Twice, [Tensor])] * 2)


def test_a_dataclass_that_optree_knows_is_treated_as_it_says() -> None:
    known: Any = Registered
    got = fcoll.vmap(lambda t: fcoll.all_reduce(t, "i"), axis_name="i")(known(torch.ones(2, 3), 0.25))
    assert type(got) is Registered
    assert got.rate == 0.25
    assert got.weight.tolist() == [[2, 2, 2]] * 2


def test_a_dataclass_is_not_initialised_again() -> None:
    @dataclasses.dataclass
    class Checked:
        x: Any
        doubled: Any = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            assert self.x is not None
            self.doubled = 2 * self.x

    got = fcoll.all_reduce(Checked(torch.tensor(3.0)), ())
    assert (float(got.x), float(got.doubled)) == (3.0, 6.0)


def test_the_tree_that_is_passed_is_not_changed() -> None:
    tree = {"a": [a()], "b": Plain(a())}
    fcoll.all_reduce(tree, ())
    assert kinds(tree) == (dict, [("a", (list, [Tensor])), ("b", (Plain, [Tensor, type(None)]))])
    assert all(torch.equal(x, a()) for x in leaves(tree))


def test_numbers_become_tensors(substrate: Substrate) -> None:
    def f(group: Any, _: Tensor) -> Any:
        numbers = {"bool": True, "int": 3, "float": 0.5, "complex": 1j}
        return {
            "any": fcoll.all_reduce(numbers, group, "any"),
            "sum": fcoll.all_reduce({k: v for k, v in numbers.items() if k != "bool"}, group),
            "gathered": fcoll.all_gather(numbers, group, tiled=False),
            "mixed": fcoll.shift((1, torch.ones(2), None), group),
        }

    n = substrate.n
    got = substrate.map(f, torch.zeros(n))
    assert {k: v.dtype for k, v in got["any"].items()} == dict.fromkeys(("bool", "int", "float", "complex"), torch.bool)
    assert {k: (v.dtype, v[0].item()) for k, v in got["sum"].items()} == {
        "int": (torch.int64, 3 * n),
        "float": (torch.float32, 0.5 * n),
        "complex": (torch.complex64, 1j * n),
    }
    assert {k: (v.dtype, tuple(v.shape)) for k, v in got["gathered"].items()} == {
        "bool": (torch.bool, (n, n)),
        "int": (torch.int64, (n, n)),
        "float": (torch.float32, (n, n)),
        "complex": (torch.complex64, (n, n)),
    }
    assert got["mixed"][0].tolist() == [1] * n
    assert got["mixed"][2] is None


def test_integers_and_truth_values_have_no_gradient(substrate: Substrate) -> None:
    def f(group: Any, tree: Any) -> Any:
        def loss(w: Tensor, tree: Any) -> Any:
            out = fcoll.all_reduce({**tree, "w": w}, group, "max")
            return (out["w"] * out["k"]).sum(), out

        gradient, out = grad(loss, has_aux=True)(tree["w"], tree)
        return gradient, out["k"], out["flag"]

    n = substrate.n
    tree = {
        "w": torch.arange(2.0 * n).view(n, 2),
        "k": torch.arange(2 * n).view(n, 2),
        "flag": torch.arange(n) > 0,
    }
    gradient, k, flag = substrate.map(f, tree)
    assert k.dtype == torch.int64
    assert flag.dtype == torch.bool
    assert flag.all()
    assert gradient.tolist() == [[0.0, 0.0]] * (n - 1) + [[n * (2.0 * n - 2), n * (2.0 * n - 1)]]


def test_integer_leaves_of_every_collective(substrate: Substrate) -> None:
    """Beside a leaf that is differentiated, in the same call."""
    n = substrate.n

    def f(group: Any, w: Tensor, k: Tensor) -> Any:
        calls = {
            "all_gather": lambda t: fcoll.all_gather(t, group),
            "all_gather invariant": lambda t: fcoll.all_gather(t, group, invariant=True),
            "all_reduce invariant": lambda t: fcoll.all_reduce(t, group, invariant=True),
            "reduce_scatter": lambda t: fcoll.reduce_scatter(t, group),
            "all_to_all": lambda t: fcoll.all_to_all(t, group),
            "broadcast": lambda t: fcoll.broadcast(t, group),
            "reduce": lambda t: fcoll.reduce(t, group),
            "gather": lambda t: fcoll.gather(t, group),
            "scatter": lambda t: fcoll.scatter(t, group),
            "permute": lambda t: fcoll.permute(t, group, [(0, 1)]),
            "vary": lambda t: fcoll.vary(t, group),
            "split": lambda t: fcoll.split(t, group),
        }
        out = {}
        for name, call in calls.items():
            y, pull, rest = vjp(lambda w, call=call: call((w, k)), w, has_aux=True)
            out[name] = rest, y, pull(torch.ones_like(y))[0]
        return out

    got = substrate.map(f, torch.ones(n, n), torch.arange(n * n).view(n, n))
    for name, (rest, y, pulled) in got.items():
        assert rest.dtype == torch.int64, name
        assert y.dtype == torch.float32, name
        assert pulled.shape == (n, n), name
        assert rest.shape == y.shape, name


def test_a_gradient_of_a_tree_is_a_tree(substrate: Substrate) -> None:
    def f(group: Any, tree: Any) -> Any:
        return grad(lambda t: (fcoll.all_reduce(t, group)["b"][0] ** 2).sum())(tree)

    n = substrate.n
    got = substrate.map(f, {"a": torch.ones(n, 2), "b": (torch.ones(n, 3), torch.ones(n))})
    assert got["a"].tolist() == [[0, 0]] * n
    assert got["b"][0].tolist() == [[2.0 * n * n] * 3] * n
    assert got["b"][1].tolist() == [0] * n


def test_the_adjoint_identity_of_a_tree() -> None:
    tree = {"a": torch.randn(3, 6), "k": torch.arange(3), "b": [torch.randn(3, 3, 2, dtype=torch.float64), None]}
    check_adjoint(lambda t: fcoll.reduce_scatter({"a": t["a"], "b": t["b"]}, "i"), tree, "i")
    check_adjoint(lambda t: fcoll.all_gather(t, "i", tiled=False), tree, "i")
    check_adjoint(lambda t: fcoll.shift(t, "i"), tree, "i")


def test_parameters(substrate: Substrate) -> None:
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(layer.weight, 1.0)
    torch.nn.init.constant_(layer.bias, 2.0)

    def f(group: Any, x: Tensor) -> Any:
        state = fcoll.all_reduce(dict(layer.named_parameters()), group)
        return {name: value.detach() for name, value in state.items()}

    n = substrate.n
    got = substrate.map(f, torch.zeros(n))
    assert got["weight"].tolist() == [[[n, n]]] * n
    assert got["bias"].tolist() == [[2 * n]] * n
