"""fcoll.vmap has the arguments and the meaning of torch.func.vmap, and a name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import grad, jvp, vjp
from torch import Tensor

import fcoll


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def unbound(name: str = "i") -> bool:
    try:
        fcoll.axis_size(name)
    except NameError:
        return True
    return False


def test_the_arguments_are_torchs_and_two_more() -> None:
    ours, theirs = inspect.signature(fcoll.vmap).parameters, inspect.signature(torch.func.vmap).parameters
    shared = ["in_dims", "out_dims", "randomness"]
    assert list(ours) == ["f", *shared, "axis_name", "axis_size"]
    assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]
    assert list(theirs)[1:4] == shared


A, B = draw(3, 4, 5), draw(4, 3, 5)
SAME_AS_TORCH: dict[str, tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]] = {
    "one": (torch.sin, 0, 0, (A,)),
    "axis 1": (torch.sin, 1, 0, (A,)),
    "axis -1 to 1": (lambda x: x * 2, -1, 1, (A,)),
    "axis -2 to -1": (lambda x: x.t(), -2, -1, (A,)),
    "two": (lambda x, y: x + y, (0, 1), 0, (A, B)),
    "one of two": (lambda x, y: x @ y.t(), (0, None), 0, (A, A[1])),
    "axes as a list": (lambda x, y: x + y, [0, 1], 0, (A, B)),
    "one axis for all": (lambda x, y: x * y, 0, 0, (A, A)),
    "a tree": (lambda t: {"p": t["x"] + t["y"][0], "q": t["y"][1]}, 0, 0, ({"x": A, "y": (A, A)},)),
    "axes as a tree": (
        lambda t: t["x"] + t["y"][0] * t["y"][1],
        ({"x": 0, "y": (1, None)},),
        0,
        ({"x": A, "y": (B, 2.0)},),
    ),
    "axes as a prefix": (lambda t, x: (t["x"] + t["y"]) * x, (1, None), 0, ({"x": B, "y": B}, A[0])),
    "a number": (lambda x, k: x * k, (0, None), 0, (A, 3.0)),
    "results in two places": (lambda x: (x, x.sum()), 0, (1, 0), (A,)),
    "a tree of results": (lambda x: {"x": x, "y": (x, x)}, 0, {"x": -1, "y": 1}, (A,)),
    "one place for many": (lambda x: (x, [x, x]), 0, 1, (A,)),
    "a constant result": (lambda x: torch.ones(2), 0, 0, (A,)),
    "None among results": (lambda x: (x, None), 0, 0, (A,)),
}


@pytest.mark.parametrize("case", SAME_AS_TORCH)
def test_as_torch(case: str) -> None:
    f, in_dims, out_dims, args = SAME_AS_TORCH[case]
    got = fcoll.vmap(f, in_dims, out_dims, axis_name="i")(*args)
    if case == "None among results":
        assert got[1] is None
        close(got[0], args[0])
        return
    want = torch.func.vmap(f, tuple(in_dims) if isinstance(in_dims, list) else in_dims, out_dims)(*args)
    close(got, want)


@pytest.mark.parametrize("case", SAME_AS_TORCH)
def test_as_torch_with_a_collective(case: str) -> None:
    """out_dims and in_dims also hold where the results are the same on all ranks."""
    f, in_dims, out_dims, args = SAME_AS_TORCH[case]
    if case == "None among results":
        out_dims = 0

    def summed(*args: Any) -> Any:
        return fcoll.all_reduce(f(*args), "i")

    got = fcoll.vmap(summed, in_dims, out_dims, axis_name="i")(*args)
    mapped = fcoll.vmap(f, in_dims, 0, axis_name="i")(*args)
    flat_got, flat_mapped = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(mapped)
    places = torch.utils._pytree.tree_leaves(out_dims)
    places = places * len(flat_got) if len(places) == 1 else places[:1] + places[1:] * (len(flat_got) - 1)
    for y, x, place in zip(flat_got, flat_mapped, places, strict=True):
        if x is not None:
            close(y, x.sum(0).unsqueeze(place).expand_as(y))


def test_keyword_arguments_are_passed_on() -> None:
    def f(x: Tensor, *, scale: Any, name: str = "") -> Any:
        assert name == "n"
        return x * scale.sum() + fcoll.all_reduce(x, "i")

    x, scale = draw(3), draw(4)
    close(fcoll.vmap(f, axis_name="i")(x, scale=scale, name="n"), x * scale.sum() + x.sum())


def test_numbers_are_results() -> None:
    def f(x: Tensor) -> Any:
        return {"n": fcoll.axis_size("i"), "half": 0.5, "yes": True, "z": 1j}

    got = fcoll.vmap(f, axis_name="i")(torch.ones(3))
    assert {name: y.tolist() for name, y in got.items()} == {
        "n": [3] * 3,
        "half": [0.5] * 3,
        "yes": [True] * 3,
        "z": [1j] * 3,
    }
    once: Any = fcoll.vmap(lambda x: fcoll.axis_size("i"), out_dims=None, axis_name="i")(torch.ones(3))
    assert once.shape == ()
    assert once == 3


def test_a_result_that_is_the_same_on_all_ranks_comes_once() -> None:
    def f(x: Tensor) -> Any:
        return fcoll.all_reduce(x, "i"), x, {"g": fcoll.all_gather(x, "i", tiled=False), "k": 1}

    x = draw(3)
    total, each, rest = fcoll.vmap(f, out_dims=(None, 0, None), axis_name="i")(x)
    close(total, x.sum())
    close(each, x)
    close(rest, {"g": x, "k": torch.tensor(1)})


def test_axis_size_alone() -> None:
    f = fcoll.vmap(lambda: fcoll.axis_index("i"), axis_name="i", axis_size=4)
    assert f().tolist() == [0, 1, 2, 3]
    g = fcoll.vmap(lambda x: x + fcoll.axis_index("i"), in_dims=None, axis_name="i", axis_size=3)
    assert g(torch.tensor(10)).tolist() == [10, 11, 12]
    h = fcoll.vmap(lambda x, y: x + y, in_dims=(None, 0), axis_name="i", axis_size=3)
    assert h(1, torch.arange(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness(randomness: str) -> None:
    def f(x: Tensor) -> Any:
        return x + torch.rand(())

    torch.manual_seed(3)
    got = fcoll.vmap(f, randomness=randomness, axis_name="i")(torch.zeros(4))
    torch.manual_seed(3)
    close(got, torch.func.vmap(f, randomness=randomness)(torch.zeros(4)))
    assert len(got.unique()) == (1 if randomness == "same" else 4)


def test_randomness_is_an_error_by_default() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        fcoll.vmap(lambda x: x + torch.rand(()), axis_name="i")(torch.zeros(4))
    assert unbound()


# ---- names


def test_names_nest() -> None:
    x = draw(2, 3)

    def f(x: Tensor) -> Any:
        sizes = fcoll.axis_size("a"), fcoll.axis_size("b"), fcoll.axis_size(("a", "b"))
        assert sizes == (2, 3, 6)
        return fcoll.all_reduce(x, "a"), fcoll.all_reduce(x, "b"), fcoll.all_reduce(x, ("b", "a"))

    over_a, over_b, over_both = fcoll.vmap(fcoll.vmap(f, axis_name="b"), axis_name="a")(x)
    close(over_a, x.sum(0).expand(2, 3))
    close(over_b, x.sum(1, keepdim=True).expand(2, 3))
    close(over_both, x.sum().expand(2, 3))


def test_of_the_same_name_the_innermost_is_meant() -> None:
    x = draw(2, 3)

    def inner(x: Tensor) -> Any:
        assert fcoll.axis_size("i") == 3
        return fcoll.all_reduce(x, "i")

    def outer(x: Tensor) -> Any:
        before = fcoll.axis_size("i")
        y = fcoll.vmap(inner, axis_name="i")(x)
        assert fcoll.axis_size("i") == before == 2
        return y, fcoll.all_reduce(x, "i")

    by_inner, by_outer = fcoll.vmap(outer, axis_name="i")(x)
    close(by_inner, x.sum(1, keepdim=True).expand(2, 3))
    close(by_outer, x.sum(0).expand(2, 3))


def test_unnamed_vmaps_inside_and_outside() -> None:
    """Between named ones, at other axis positions, mapped or not."""
    x = draw(2, 5, 3, 4)  # batch, inner batch, ranks, features

    def f(x: Tensor) -> Any:  # features
        return fcoll.all_gather(x, "i", -1, tiled=False), fcoll.shift(x, "i")

    run = torch.func.vmap(fcoll.vmap(torch.func.vmap(f, in_dims=0, out_dims=1), in_dims=1, axis_name="i"), out_dims=2)
    gathered, shifted = run(x)
    assert gathered.shape == (3, 4, 2, 5, 3)
    for rank in range(3):
        close(gathered[rank], x.permute(3, 0, 1, 2))
        close(shifted[rank], x[:, :, rank - 1].permute(2, 0, 1))


def test_an_unnamed_vmap_between_two_names() -> None:
    x = draw(2, 3, 4)
    f = fcoll.vmap(lambda x: fcoll.all_gather(x, ("a", "b"), tiled=False), axis_name="b")
    got = fcoll.vmap(torch.func.vmap(f, in_dims=0), axis_name="a")(x.movedim(2, 1))  # a, unnamed, b
    for a in range(2):
        for b in range(3):
            close(got[a, :, b], x.permute(2, 0, 1).reshape(4, 6))


def test_the_name_goes_with_the_map() -> None:
    f = fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")
    assert unbound()
    assert f(torch.ones(2)).tolist() == [2, 2]
    assert unbound()
    with pytest.raises(ZeroDivisionError):
        fcoll.vmap(lambda x: 1 / 0, axis_name="i")(torch.ones(2))
    assert unbound()
    with pytest.raises(ValueError, match="out of range"):
        fcoll.vmap(lambda x: fcoll.all_gather(x, "i", 9), axis_name="i")(torch.ones(2))
    assert unbound()
    assert f(torch.ones(3)).tolist() == [3, 3, 3]


def test_a_value_that_escapes_its_map_is_no_silent_number() -> None:
    kept: list[Tensor] = []
    fcoll.vmap(lambda x: kept.append(x) or x, axis_name="i")(torch.ones(2))  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError):
        fcoll.vmap(lambda x: fcoll.all_reduce(kept[0], "i"), axis_name="i")(torch.ones(3))
    assert unbound()


def test_metadata_of_the_function_is_kept() -> None:
    def named(x: Tensor) -> Tensor:
        """What it does."""
        return x

    mapped = fcoll.vmap(named, axis_name="i")
    assert (mapped.__name__, mapped.__doc__) == ("named", "What it does.")
    module = torch.nn.Linear(2, 2)
    assert fcoll.vmap(module, axis_name="i")(torch.ones(3, 2)).shape == (3, 2)


def test_transforms_of_maps_of_transforms() -> None:
    x = draw(3)
    loss = fcoll.vmap(lambda x: fcoll.all_reduce(x, "i") ** 2, axis_name="i", out_dims=None)
    close(grad(loss)(x), (2 * x.sum()).expand(3))  # one loss comes out, so one is differentiated
    close(jvp(loss, (x,), (torch.ones(3),))[1], 6 * x.sum())
    inside = fcoll.vmap(grad(lambda x: fcoll.all_reduce(x, "i") ** 2), axis_name="i")
    close(inside(x), (6 * x.sum()).expand(3))
    close(vjp(inside, x)[1](torch.ones(3))[0], torch.full((3,), 18.0))


# ---- errors


def bad(kind: type[Exception], message: str, f: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        f()
    assert isinstance(caught.value, fcoll.FcollError)
    assert str(caught.value).splitlines()[0] == message
    assert unbound()


def same(*args: Any) -> Any:
    return args[0]


def test_bad_names() -> None:
    names: list[Any] = [3, None, ("a", "b")]
    for name in names:
        text = f"vmap: axis_name is a string, got {type(name).__name__}"
        bad(TypeError, text, functools.partial(fcoll.vmap, same, axis_name=name))
    with pytest.raises(TypeError, match="axis_name"):
        fcoll.vmap(same)  # type: ignore[call-arg]


def test_bad_inputs() -> None:
    x = torch.ones(3, 4)

    def run(*args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: fcoll.vmap(same, axis_name="i", **options)(*args)

    bad(ValueError, "vmap: no argument is mapped; give axis_size", run())
    bad(ValueError, "vmap: no argument is mapped; give axis_size", run(x, in_dims=None))
    bad(ValueError, "vmap: args[0] of shape (3, 4) has no axis 2 to map", run(x, in_dims=2))
    bad(ValueError, "vmap: args[1] of shape () has no axis 0 to map", run(x, torch.tensor(1.0)))
    bad(
        ValueError,
        "vmap: args[1]['k'] of shape (2,) has size 2 along axis 0, others have 3",
        run(x, {"k": torch.ones(2)}),
    )
    bad(ValueError, "vmap: args[0] of shape (3, 4) has size 3 along axis 0, others have 5", run(x, axis_size=5))
    bad(TypeError, "vmap: args[1] is a float, which has no axis to map; give it in_dims None", run(x, 1.0))
    bad(TypeError, "vmap: args[0][1] is a str, which has no axis to map; give it in_dims None", run((x, "s")))
    bad(TypeError, "vmap: in_dims holds integers and None, got str", run(x, in_dims="0"))
    bad(TypeError, "vmap: in_dims holds integers and None, got bool", run(x, in_dims=True))
    bad(ValueError, "vmap: axis_size=-1 is negative", run(in_dims=None, axis_size=-1))
    bad(ValueError, "vmap: in_dims=(0, 0) is no prefix of the tree of arguments", run(x, in_dims=(0, 0)))
    bad(ValueError, "vmap: in_dims=({'a': 0},) is no prefix of the tree of arguments", run(x, in_dims=({"a": 0},)))


def test_bad_results() -> None:
    x = torch.ones(3)

    def run(f: Callable[[Any], Any], out_dims: Any = 0) -> Callable[[], Any]:
        return lambda: fcoll.vmap(f, out_dims=out_dims, axis_name="i")(x)

    bad(
        TypeError,
        "vmap: out['s'] of the result is a str; f returns tensors, numbers and None",
        run(lambda x: {"s": "no"}),
    )
    bad(ValueError, "vmap: out_dims=(0, 0) is no prefix of the tree of results", run(lambda x: x, (0, 0)))
    bad(ValueError, "vmap: out has shape (), so the ranks cannot go to axis 1", run(lambda x: x, 1))
    bad(ValueError, "vmap: out['x'] has shape (), so the ranks cannot go to axis -2", run(lambda x: {"x": x}, -2))
    bad(TypeError, "vmap: out_dims holds integers and None, got str", run(lambda x: x, "0"))
    with pytest.raises(ValueError, match="varies over 'i'") as caught:
        run(lambda x: (fcoll.all_reduce(x, "i"), x), None)()
    assert "out[1]" in str(caught.value)
    assert unbound()
