"""fcoll agrees with JAX: every case of golden/golden.json, by emulation and on gloo, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from golden import programs
from golden.cases import (
    Case,
    by_name,
    differences,
    families,
    inside,
    merged,
    of_world,
    on_process,
    outside,
    per_rank,
    ranks_of,
    single,
    together,
    wanted,
)
from golden.expressions import evaluate, evaluate_typed
from golden.load_golden import load
from torch import Tensor

import fcoll
from fcoll import lax
from fcoll.testing import Ranks

Pools = Callable[[int], Ranks]

SINGLE = single()
BY_FAMILY = families(SINGLE)
WHOLE_FAMILIES = ("constant", "error", "quirk", "grad_context", "program")
FIRST_ORDER = ("out", "vjp", "jvp")


def of_family(family: str) -> list[Case]:
    return [case for case in load() if case["family"] == family]


def ids(cases: Sequence[Case]) -> list[str]:
    return [case["id"].removeprefix(case["op"] + "/") for case in cases]


def first_order(case: Case) -> list[str]:
    """What is compiled: of nests with unnamed levels, whose compilation takes longest, no jvp."""
    names = FIRST_ORDER if all(level.name for level in case["levels"]) else FIRST_ORDER[:2]
    return [name for name in wanted(case) if name in names]


def compare(names: Sequence[str], want: dict[str, Any], got: Sequence[Any], label: str) -> list[str]:
    return [p for name, y in zip(names, got, strict=True) for p in differences(y, want[name], f"{label} {name}")]


def check(problems: list[str]) -> None:
    assert not problems, f"{len(problems)} differences\n" + "\n".join(problems)


def test_every_case_is_tested() -> None:
    known = [case["id"] for case in load()]
    assert len(set(known)) == len(known) == 302
    one_collective = {case["id"].partition(" (")[0] for case in SINGLE}
    whole = {case["id"] for family in WHOLE_FAMILIES for case in of_family(family)}
    assert one_collective | whole == set(known)
    assert not one_collective & whole
    assert set(EXPECTED_ERRORS) == {case["id"] for case in of_family("error") if case["op"] != "vma_typing"}
    assert set(TYPING) == {case["id"] for case in load() if case["op"] == "vma_typing"}


# ---- one collective


@pytest.mark.parametrize("family", BY_FAMILY)
def test_emulated(family: str) -> None:
    problems = []
    for case in BY_FAMILY[family]:
        for program in (outside, inside):
            for names in (["out"], wanted(case)):
                f, arguments, want = program(case, names)
                problems += compare(names, want, f(*arguments), f"{case['id']} {program.__name__}")
    check(problems)


BATCHES = together(SINGLE)


def nest_of(batch: Case) -> str:
    levels = [f"{level.name or '-'}{level.n}[{level.in_axis},{level.out_axis}]" for level in batch["levels"]]
    return "".join(levels) + f"-{len(batch['parts'])}"


def compiled_differences(batch: Case, program: Callable[..., Any], names: Sequence[str], backend: str) -> list[str]:
    torch.compiler.reset()
    f, arguments, want = program(batch, names)
    compiled: Callable[..., Any] = torch.compile(f, fullgraph=True, backend=backend)
    try:
        got = compiled(*arguments)
    except Exception as error:
        error.add_note(f"compiling {program.__name__} of {[part['id'] for part in batch['parts']]}")
        raise
    label = f"{program.__name__} compiled"
    return [
        problem
        for name, ys in zip(names, got, strict=True)
        for part, y, expected in zip(batch["parts"], ys, want[name], strict=True)
        for problem in differences(y, expected, f"{part['id']} {label} {name}")
    ]


@pytest.mark.long
@pytest.mark.parametrize("batch", BATCHES, ids=nest_of)
def test_emulated_compiled(batch: Case) -> None:
    check(compiled_differences(batch, outside, first_order(batch), "aot_eager"))


def of_size(cases: Sequence[Case], n: int) -> list[Case]:
    return [case for case in cases if ranks_of(case) == n]


SECOND_ORDER = [batch for batch in together(of_size(SINGLE, 3)) if "gg_x" in batch]


@pytest.mark.long
@pytest.mark.parametrize("batch", SECOND_ORDER, ids=nest_of)
def test_second_order_compiled(batch: Case) -> None:
    check(compiled_differences(batch, inside, wanted(batch), "aot_eager"))


def test_emulated_inductor() -> None:
    sample = [BY_FAMILY[f"basic-{op}"][0] for op in ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all")]
    for batch in together(sample):
        check(compiled_differences(batch, outside, first_order(batch), "inductor"))


def run_parts(parts: list[tuple[Case, list[str]]], backend: str | None) -> list[Any]:
    """On a rank: the quantities of its parts of the cases."""
    results = []
    for case, names in parts:
        f, arguments = on_process(case, names)
        if backend:
            torch.compiler.reset()
            f = torch.compile(f, fullgraph=True, backend=backend)
        results.append(f(*arguments))
    return results


SIZES = {
    f"{family}-{n}": (family, n)
    for family in dict.fromkeys(case["family"] for case in SINGLE)
    for n in (1, 2, 3, 4)
    if any(case["family"] == family and ranks_of(case) == n for case in SINGLE)
}


@pytest.mark.parametrize("family_and_size", SIZES)
def test_processes(family_and_size: str, ranks: Pools) -> None:
    family, n = SIZES[family_and_size]
    cases = of_size([case for case in SINGLE if case["family"] == family], n)
    split = [per_rank(case) for case in cases]
    parts = [
        ([(ps[rank], names) for case, (ps, _) in zip(cases, split, strict=True) for names in (["out"], wanted(case))],)
        for rank in range(n)
    ]
    problems = []
    for rank, results in enumerate(ranks(n).run(run_parts, None, per_rank=parts)):
        for k, (case, (_, wants)) in enumerate(zip(cases, split, strict=True)):
            label = f"{case['id']} rank {rank}"
            problems += compare(["out"], wants[rank], results[2 * k], label)
            problems += compare(wanted(case), wants[rank], results[2 * k + 1], label)
    check(problems)


@pytest.mark.long
def test_processes_compiled(ranks: Pools) -> None:
    n = 2
    sample = [case for cases in BY_FAMILY.values() for case in of_size(cases, n)[:2]]
    batches = together(sample)
    split = [[per_rank(part) for part in batch["parts"]] for batch in batches]
    names = [first_order(batch) for batch in batches]

    def parts_of(rank: int) -> tuple[list[tuple[Case, list[str]]]]:
        return ([(merged([ps[rank] for ps, _ in pairs]), which) for pairs, which in zip(split, names, strict=True)],)

    problems = []
    for rank, results in enumerate(ranks(n).run(run_parts, "aot_eager", per_rank=[parts_of(r) for r in range(n)])):
        for batch, pairs, which, result in zip(batches, split, names, results, strict=True):
            for k, (part, (_, wants)) in enumerate(zip(batch["parts"], pairs, strict=True)):
                label = f"{part['id']} compiled, rank {rank}"
                problems += compare(which, wants[rank], [ys[k] for ys in result], label)
    check(problems)


# ---- constants


@pytest.mark.parametrize("case", of_family("constant"), ids=ids(of_family("constant")))
def test_constant(case: Case) -> None:
    [[_, n]] = case["axes"]
    params = dict(case["params"])
    call = functools.partial(getattr(lax, case["op"]), axis_name=params.pop("axis_name"), **params)
    value = case["in"].item() if case["in_is_python_scalar"] else case["in"]
    found = []

    def f(_: Tensor) -> Any:
        found.append(call(value))
        return found[0]

    out = fcoll.vmap(f, axis_name="i")(torch.arange(n))
    [kind] = case["returns_type"]
    assert type(found[0]) is {"int": int, "float": float, "ndarray": Tensor}[kind]
    check(differences(out.to(case["out"].dtype), case["out"], case["id"]))


# ---- errors

RIGHT_HERE: dict[str, Callable[[Tensor], Tensor]] = {  # JAX raises, fcoll computes: the value, of the stack of inputs
    "ppermute/error/partial-under-vmap": lambda x: torch.stack((0 * x[0], x[0], x[1], 0 * x[0])),
    "all_to_all/error/grad-untiled-split-not-concat": lambda x: 2 * x,
    "pmax/error/grad-stop-outside": lambda x: x.amax(0).expand(x.shape),
}
EXPECTED_ERRORS: dict[str, type[Exception] | None] = {
    "psum/error/unbound-axis": NameError,
    "psum/error/groups-overlap": ValueError,
    "psum/error/groups-too-short": ValueError,
    "ppermute/error/index-out-of-range": ValueError,
    "pshuffle/error/not-a-permutation": ValueError,
    "all_gather/error/uneven-groups": ValueError,
    "all_gather/error/bad-to": ValueError,
    "all_to_all/error/tiled-indivisible": ValueError,
    "psum_scatter/error/untiled-dim-not-n": ValueError,
    "psum_scatter/error/tiled-indivisible": ValueError,
    "pmax/error/complex": TypeError,
    "pswapaxes/error/size-mismatch": ValueError,
    "axis_size/error/unbound-axis": NameError,
    **dict.fromkeys(RIGHT_HERE),
}
ERRORS = [case for case in of_family("error") if case["id"] in EXPECTED_ERRORS]


def outcome(case: Case, groups: Callable[[Any], Any], x: Tensor) -> Any:
    """On a process: the value, or the error, which `Ranks` would end the call for."""
    try:
        return evaluate(case["params"]["expr"], groups, x=x)
    except Exception as error:
        return error


def run_errors(x: list[Tensor], cases: list[Case]) -> list[Any]:
    def groups(name: Any) -> Any:
        return fcoll.WORLD if name == "i" else name

    return [outcome(case, groups, each) for case, each in zip(cases, x, strict=True)]


@pytest.mark.parametrize("case", ERRORS, ids=[case["id"].replace("/error", "") for case in ERRORS])
def test_error(case: Case) -> None:
    expected = EXPECTED_ERRORS[case["id"]]
    f = fcoll.vmap(lambda x: evaluate(case["params"]["expr"], by_name, x=x), axis_name="i")
    if expected is None:
        check(differences(f(case["in"]), RIGHT_HERE[case["id"]](case["in"]), case["id"]))
    else:
        with pytest.raises(expected) as caught:
            f(case["in"])
        assert isinstance(caught.value, fcoll.FcollError)


def test_errors_on_processes(ranks: Pools) -> None:
    parts = [([case["in"][rank] for case in ERRORS],) for rank in range(4)]
    for rank, outcomes in enumerate(ranks(4).run(run_errors, ERRORS, per_rank=parts)):
        for case, found in zip(ERRORS, outcomes, strict=True):
            expected = EXPECTED_ERRORS[case["id"]]
            if expected is None:
                check(differences(found, RIGHT_HERE[case["id"]](case["in"])[rank], f"{case['id']} rank {rank}"))
            else:
                assert isinstance(found, expected), case["id"]
                assert isinstance(found, fcoll.FcollError), case["id"]


# ---- the typing rules of check_vma=True. fcoll has no types that say what varies: vmap's out_dims=None asks the value.


def gathered_is_replicated(x: Tensor) -> None:
    """JAX types all_gather as varying and refuses out_specs=P(); here the result, equal on all ranks, comes once."""
    once = fcoll.vmap(lambda x: lax.all_gather(x, "i"), axis_name="i", out_dims=None)(x)
    check(differences(once, x, "all_gather"))


def mixed_sum_counts_every_rank(x: Tensor) -> None:
    """JAX refuses a psum over a name that x varies over and one that it does not; here b counts twice."""
    f = fcoll.vmap(lambda x: lax.psum(x, ("a", "b")), None, None, axis_name="b", axis_size=2)
    check(differences(fcoll.vmap(f, axis_name="a", out_dims=None)(x), 2 * x.sum(0), "psum"))


def cast_of_varying_is_identity(x: Tensor) -> None:
    """JAX refuses pcast of what varies already; here it is the identity on values."""
    check(differences(fcoll.vmap(lambda x: lax.pcast(x, "i", to="varying"), axis_name="i")(x), x, "pcast"))


def grouped_maximum_varies(x: Tensor) -> None:
    """JAX types it as invariant and returns rank 0's; here every group has its own, and out_dims=None is refused."""

    def f(x: Tensor) -> Tensor:
        return lax.pmax(x, "i", axis_index_groups=[[0, 1], [2, 3]])

    own = x.unflatten(0, (2, 2)).amax(1, keepdim=True).expand(2, 2, 1).flatten(0, 1)
    check(differences(fcoll.vmap(f, axis_name="i")(x), own, "pmax"))
    with pytest.raises(ValueError, match="varies over 'i'"):
        fcoll.vmap(f, axis_name="i", out_dims=None)(x)


TYPING = {
    "vma_typing/error/all_gather-is-varying": gathered_is_replicated,
    "vma_typing/error/psum-mixed-varying-invariant": mixed_sum_counts_every_rank,
    "vma_typing/error/pcast-of-varying": cast_of_varying_is_identity,
    "vma_typing/quirk/grouped-pmax-typed-invariant": grouped_maximum_varies,
}
TYPED = [case for case in load() if case["op"] == "vma_typing"]


@pytest.mark.parametrize("case", TYPED, ids=ids(TYPED))
def test_vma_typing(case: Case) -> None:
    TYPING[case["id"]](case["in"])


# ---- gradients in context

CONTEXTS = of_family("grad_context")
PCAST = "grad_context/n4/pcast-w"
INVARYING = "grad_context/n4/all_gather-invarying"


def loss(case: Case, groups: Callable[[Any], Any], x: Tensor, w: Tensor) -> Tensor:
    value: Tensor = evaluate(case["params"]["expr"], groups, x=x, w=w).sum()
    return value


def typed_loss(case: Case, group: Any, x: Tensor, w: Tensor, *, varying: bool = False) -> Tensor:
    value = evaluate_typed(case["params"]["expr"], group, x, w)
    return (value.varying() if varying else value.value).sum()


def both(gradients: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip("xw", gradients, strict=True))


def over_ranks(f: Callable[..., Any], out_dims: Any = 0) -> Callable[..., Any]:
    return fcoll.vmap(f, (0, None), out_dims, axis_name="i")


def inner(case: Case, mode: str) -> dict[str, Tensor] | None:
    """What a gradient taken inside should be, one row per rank; None where JAX has none."""
    if case["id"] == PCAST:  # its transpose is psum everywhere here, in JAX only under check_vma=True
        mode = "vma_in"
    grads = case["grads"][mode]
    return None if "error" in grads else {"x": grads["x"], "w": grads["w"].expand(4)}


@pytest.mark.parametrize("case", CONTEXTS, ids=ids(CONTEXTS))
def test_grad_context(case: Case) -> None:
    x, w = case["x"], case["w"]
    plain = functools.partial(loss, case, by_name)
    problems = differences(over_ranks(plain)(x, w), case["loss_per_rank"], "loss")

    found = both(over_ranks(torch.func.grad(plain, (0, 1)))(x, w))
    for mode in ("vmap_in", "novma_in"):
        if want := inner(case, mode):
            problems += differences(found, want, mode)
    found = both(over_ranks(torch.func.grad(functools.partial(typed_loss, case, "i"), (0, 1)))(x, w))
    problems += differences(found, inner(case, "vma_in"), "vma_in")

    modes = ["vmap_out_ranked", "novma_out_ranked", "vma_out_ranked"]
    found = both(torch.func.grad(lambda x, w: over_ranks(plain)(x, w).sum(), (0, 1))(x, w))
    if case["id"] == INVARYING:  # check_vma=True ends it with a pcast
        every = functools.partial(typed_loss, case, "i", varying=True)
        cast = both(torch.func.grad(lambda x, w: over_ranks(every)(x, w).sum(), (0, 1))(x, w))
        problems += differences(cast, case["grads"][modes.pop()], "vma_out_ranked")
    for mode in modes:
        if "error" not in case["grads"][mode]:
            problems += differences(found, case["grads"][mode], mode)

    single_loss = torch.func.grad(over_ranks(plain, out_dims=None), (0, 1))
    varies = not bool((case["loss_per_rank"] == case["loss_per_rank"][0]).all())
    if varies or case["id"] == INVARYING:  # where vmap keeps one result per rank, as it does with invariant=True
        with pytest.raises(ValueError, match="varies over 'i'"):
            single_loss(x, w)
    else:
        mode = "novma_out_single" if "error" in case["grads"]["vma_out_single"] else "vma_out_single"
        problems += differences(both(single_loss(x, w)), case["grads"][mode], mode)
    check(problems)


def run_contexts(xs: list[Tensor], cases: list[Case]) -> list[tuple[Any, ...]]:
    results = []
    for case, x in zip(cases, xs, strict=True):
        plain = functools.partial(loss, case, lambda _: fcoll.WORLD)
        typed = functools.partial(typed_loss, case, fcoll.WORLD)
        gradients = [torch.func.grad(f, (0, 1))(x, case["w"]) for f in (plain, typed)]
        results.append((plain(x, case["w"]), *gradients))
    return results


def test_grad_context_on_processes(ranks: Pools) -> None:
    parts = [([case["x"][rank] for case in CONTEXTS],) for rank in range(4)]
    problems = []
    for rank, results in enumerate(ranks(4).run(run_contexts, CONTEXTS, per_rank=parts)):
        for case, (value, *gradients) in zip(CONTEXTS, results, strict=True):
            label = f"{case['id']} rank {rank}"
            problems += differences(value, case["loss_per_rank"][rank], f"{label} loss")
            for mode, found in zip(("novma_in", "vma_in"), gradients, strict=True):
                want = inner(case, mode)
                assert want is not None
                row = {name: rows[rank] for name, rows in want.items()}
                problems += differences(both(found), row, f"{label} {mode}")
    check(problems)


# ---- whole programs

PROGRAMS = of_family("program")
TRAINED = [case for case in PROGRAMS if case["name"] != "dp_sgd_trajectory"]


def values(case: Case) -> dict[str, Tensor]:
    return {name: given["value"] for name, given in case["inputs"].items()}


def over_mesh(case: Case, f: Callable[..., Any], out_dims: Callable[[str], Any]) -> Callable[..., Any]:
    """Map f of the values by name over every mesh axis, by their layouts."""
    for axis, n in reversed(case["axes"]):
        in_dims = {name: 0 if axis in given["layout"] else None for name, given in case["inputs"].items()}
        f = fcoll.vmap(f, (in_dims,), out_dims(axis), axis_name=axis, axis_size=n)
    return f


def global_program(case: Case) -> Callable[..., Any]:
    layouts = case["aux_layouts"]
    f = programs.program(case, by_name)
    return over_mesh(
        case, f, lambda axis: (None, {name: 0 if axis in layout else None for name, layout in layouts.items()})
    )


@pytest.mark.parametrize("case", TRAINED, ids=ids(TRAINED))
def test_program_differentiated_outside(case: Case) -> None:
    f, dense = global_program(case), case["dense"]
    value, aux, gradients = programs.loss_and_gradients(f, case["wrt"], values(case))
    problems = differences(value, dense["loss"], "loss") + differences(aux, dense["aux"], "aux")
    problems += differences(gradients, dense["grads"], "grads")
    problems += differences(gradients, case["sharded"]["grads"], "sharded grads")
    problems += differences(programs.second_order(f, case["wrt"], values(case)), dense["gg"], "gg")
    check(problems)


@pytest.mark.parametrize("case", TRAINED, ids=ids(TRAINED))
def test_program_differentiated_inside(case: Case) -> None:
    f = functools.partial(programs.loss_and_gradients, programs.program(case, by_name), case["wrt"])
    gradients = over_mesh(case, lambda v: f(v)[2], lambda _: 0)(values(case))
    check(differences(gradients, case["novma_in"]["grads"], "novma_in"))


COMPILED = [case for case in TRAINED if case["id"].split("/")[1] in ("megatron_mlp", "moe_all_to_all", "dp_tp_mlp")]


@pytest.mark.parametrize("case", COMPILED, ids=ids(COMPILED))
def test_program_compiled(case: Case) -> None:
    torch.compiler.reset()
    run = functools.partial(programs.loss_and_gradients, global_program(case), case["wrt"])
    value, aux, gradients = torch.compile(run, fullgraph=True, backend="aot_eager")(values(case))
    problems = differences(value, case["dense"]["loss"], "loss") + differences(aux, case["dense"]["aux"], "aux")
    check(problems + differences(gradients, case["dense"]["grads"], "grads"))


def test_training_trajectory() -> None:
    (case,) = (case for case in PROGRAMS if case["name"] == "dp_sgd_trajectory")
    found = over_mesh(case, programs.program(case, by_name), lambda _: None)(values(case))
    check(differences(found, case["dense"]["trajectory"], "trajectory"))


def run_programs(parts: list[tuple[Case, dict[str, Tensor]]]) -> list[Any]:
    results: list[Any] = []
    for case, v in parts:
        f = programs.program(case, of_world(case))
        wrt = case.get("wrt")
        results.append(programs.loss_and_gradients(f, wrt, v) if wrt else f(v))
    return results


def rank_row(value: Tensor, layout: Sequence[str], place: dict[str, int]) -> Tensor:
    return value[tuple(place[axis] for axis in layout)]


@pytest.mark.parametrize("n", [2, 4])
def test_programs_on_processes(n: int, ranks: Pools) -> None:
    cases = [{**case, "levels": programs.levels(case)} for case in PROGRAMS]
    cases = of_size(cases, n)
    places = [[dict(zip(dict(case["axes"]), place, strict=True)) for place in programs.places(case)] for case in cases]
    parts: list[tuple[list[Any]]] = [([],) for _ in range(n)]
    for case, at in zip(cases, places, strict=True):
        light = {key: case[key] for key in ("name", "params", "axes", "levels", "wrt") if key in case}
        for rank in range(n):
            rows = {k: rank_row(given["value"], given["layout"], at[rank]) for k, given in case["inputs"].items()}
            parts[rank][0].append((light, rows))
    problems = []
    for rank, results in enumerate(ranks(n).run(run_programs, per_rank=parts)):
        for case, at, result in zip(cases, places, results, strict=True):
            label = f"{case['id']} rank {rank}"
            if "wrt" not in case:
                problems += differences(result, case["dense"]["trajectory"], f"{label} trajectory")
                continue
            value, aux, gradients = result
            axes, dense = list(dict(case["axes"])), case["dense"]
            wants = {k: rank_row(y, case["aux_layouts"][k], at[rank]) for k, y in dense["aux"].items()}
            rows = {k: rank_row(y, axes, at[rank]) for k, y in case["novma_in"]["grads"].items()}
            problems += differences(value, dense["loss"], f"{label} loss")
            problems += differences(aux, wants, f"{label} aux")
            problems += differences(gradients, rows, f"{label} novma_in")
    check(problems)
