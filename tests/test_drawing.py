"""Pictures: what they say is what an independent table says, and everyone can read it."""

from __future__ import annotations

import itertools
import math
import pathlib
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from common import Pools
from table import DIFFERENTIABLE, TABLE, Row
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fcoll
from fcoll import P, layouts, provenance, svg
from fcoll.errors import CollectiveTypeError, CollectiveValueError, UnboundAxisError
from fcoll.provenance import Flow, Origin

SIZES = (2, 3, 4)
LINEAR = [row for row in DIFFERENTIABLE if row.linear]
OTHERS = [row for row in TABLE if row not in LINEAR]


def follow(row: Row, n: int) -> Flow:
    return provenance.follow(row.on("i"), [("i", n)], (torch.zeros(row.shape(n), dtype=torch.float64),), ["x"])


def factors(rows: list[list[Origin]], width: int) -> Tensor:
    """What each number is made of: a row per number, a column per number of the ranks that it may come from."""
    found = torch.zeros(sum(map(len, rows)), len(rows) * width, dtype=torch.float64)
    for i, origin in enumerate(itertools.chain(*rows)):
        for term in origin.terms:
            found[i, term.rank * width + term.number] = term.factor
    return found


def columns(f: Callable[[Tensor], Tensor], n: int, shape: Sequence[int]) -> Tensor:
    """A linear function of the stack of all ranks, as a matrix: one unit vector after the other."""
    units = torch.eye(n * math.prod(shape), dtype=torch.float64)
    return torch.stack([f(unit.reshape(n, *shape)).flatten() for unit in units], 1)


def lines(picture: fcoll.Picture) -> list[list[str]]:
    """The rows of the picture's table, cells apart."""
    table = picture.text.split("\n\n")[1]
    return [line.split() for line in table.splitlines()[2:]]


# ---- what comes from where


@pytest.mark.parametrize("row", LINEAR, ids=str)
def test_linear_collectives(row: Row) -> None:
    """Forward and backward agree with the meaning of the row, which is written without fcoll."""
    for n in SIZES:
        flow, shape = follow(row, n), row.shape(n)
        out = row.values(torch.zeros(n, *shape, dtype=torch.float64)).shape[1:]
        forward, backward = factors(flow.forward, math.prod(shape)), factors(flow.backward, math.prod(out))
        torch.testing.assert_close(forward, columns(row.values, n, shape), rtol=1e-5, atol=0)
        x = row.inputs(n)
        torch.testing.assert_close(backward, columns(lambda c, x=x: row.pull(x, c), n, out), rtol=1e-5, atol=0)  # type: ignore[misc]
        if not row.once:
            torch.testing.assert_close(backward, forward.T, rtol=1e-5, atol=0)
        origins = [*itertools.chain(*flow.forward, *flow.backward)]
        assert {(origin.kind, origin.offset, origin.depends) for origin in origins} == {("sum", 0.0, False)}


def test_the_rows_are_those_of_the_table() -> None:
    assert len(LINEAR) > 40
    assert {row.name.split()[0] for row in OTHERS} == {"all_reduce", "reduce", "reduce_scatter", "argmax", "argmin"}


@pytest.mark.parametrize("row", OTHERS, ids=str)
def test_other_collectives(row: Row) -> None:
    """They are named, and depend on what their results change with."""
    for n in SIZES:
        flow, shape = follow(row, n), row.shape(n)
        width = math.prod(shape)
        base = torch.linspace(1, 2, n * width, dtype=torch.float64)
        found = torch.zeros(sum(map(len, flow.forward)), n * width, dtype=torch.bool)
        for start, changed, i in itertools.product((base, 0 * base), (0.0, 9.0, -9.0), range(n * width)):
            x = start.clone()
            x[i] = changed
            before, after = (row.values(stack.reshape(n, *shape)).flatten() for stack in (start, x))
            found[:, i] |= before != after
        terms = [{(term.rank, term.number) for term in o.terms} for o in itertools.chain(*flow.forward)]
        assert terms == [{divmod(int(i), width) for i in line.nonzero()} for line in found]
        kinds = {origin.kind for origin in itertools.chain(*flow.forward) if origin.terms}
        assert kinds == {next(word for word in KINDS if word in row.name.split()).replace("prod", "product")}


KINDS = ("max", "min", "prod", "any", "all", "argmax", "argmin")


TABLES: list[tuple[str, dict[str, Any], list[str]]] = [  # the cells of each rank: x, y, ȳ, x̄
    ("all_reduce", {"n": 2}, ["0 Σ0,1 0 Σ0,1", "1 Σ0,1 1 Σ0,1"]),
    ("all_reduce", {"n": 4, "op": "mean"}, [f"{r} mean0–3 {r} mean0–3" for r in range(4)]),
    ("all_reduce", {"n": 3, "op": "max"}, [f"{r} max0–2 {r} ƒ′Σ0–2" for r in range(3)]),
    ("all_reduce", {"n": 2, "op": "prod"}, [f"{r} Π0,1 {r} ƒ′Σ0,1" for r in range(2)]),
    ("all_reduce", {"n": 2, "op": "any"}, ["0 any0,1", "1 any0,1"]),
    ("argmin", {"n": 3}, [f"{r} argmin0–2" for r in range(3)]),
    ("all_reduce", {"n": 3, "invariant": True}, [f"{r} Σ0–2 {r} {r}" for r in range(3)]),
    ("all_gather", {"n": 2}, ["0 0 1 0a 0b Σ0,1a", "1 0 1 1a 1b Σ0,1b"]),
    ("all_gather", {"n": 2, "invariant": True}, ["0 0 1 0a 0b 0a", "1 0 1 1a 1b 1b"]),
    ("reduce_scatter", {"n": 2}, ["0a 0b Σ0,1a 0 0 1", "1a 1b Σ0,1b 1 0 1"]),
    ("all_to_all", {"n": 2}, ["0a 0b 0a 1a 0a 0b 0a 1a", "1a 1b 0b 1b 1a 1b 0b 1b"]),
    ("broadcast", {"n": 3, "src": 1}, ["0 1 0 zero", "1 1 1 Σ0–2", "2 1 2 zero"]),
    ("reduce", {"n": 3, "dst": 1}, ["0 zero 0 1", "1 Σ0–2 1 1", "2 zero 2 1"]),
    ("gather", {"n": 2, "dst": 1}, ["0 zero zero 0a 0b 1a", "1 0 1 1a 1b 1b"]),
    ("scatter", {"n": 2}, ["0a 0b 0a 0 0 1", "1a 1b 0b 1 zero zero"]),
    ("permute", {"n": 3, "perm": [(0, 2), (2, 1)]}, ["0 zero 0 2", "1 2 1 zero", "2 0 2 1"]),
    ("shift", {"n": 4}, ["0 3 0 1", "1 0 1 2", "2 1 2 3", "3 2 3 0"]),
    ("prefix_sum", {"n": 3}, ["0 0 0 Σ0–2", "1 Σ0,1 1 Σ1,2", "2 Σ0–2 2 2"]),
    ("vary", {"n": 2}, ["0 0 0 Σ0,1", "1 1 1 Σ0,1"]),
    ("split", {"n": 2}, ["0a 0b 0a 0 0 1", "1a 1b 1b 1 0 1"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "cells"), TABLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_words_in_the_cells(name: str, options: dict[str, Any], cells: list[str]) -> None:
    picture = fcoll.draw(getattr(fcoll, name), **options)
    got = ["".join(line[1:]).replace("→", "") for line in lines(picture)]
    assert got == [text.replace(" ", "") for text in cells]
    labels = [shape.text for shape in picture.shapes if isinstance(shape, svg.Label)]
    for cell in set(picture.text.split("\n\n")[1].replace("→", " ").split("\n")[-1].split("  ")) - {""}:
        assert cell.strip() in " ".join(labels)  # the drawing has what the table has
    given = "".join(f", {key}={value!r}" for key, value in options.items() if key != "n")
    assert picture.title == f"{name}(x, 'i'{given}), i={options['n']}"


def test_compositions() -> None:
    def twice(x: Tensor, group: str) -> Tensor:
        return fcoll.shift(fcoll.shift(x, group), group) - 2 * x

    flow = provenance.follow(lambda x: twice(x, "i"), [("i", 4)], (torch.zeros(1),), ["x"])
    want = torch.roll(torch.eye(4, dtype=torch.float64), 2, 0) - 2 * torch.eye(4, dtype=torch.float64)
    assert torch.equal(factors(flow.forward, 1), want)
    assert torch.equal(factors(flow.backward, 1), want.T)
    assert lines(fcoll.draw(twice, n=3))[0] == ["0", "0", "→", "wΣ", "0,1", "0", "→", "wΣ", "0,2"]

    groups = fcoll.draw(lambda x, g: fcoll.all_reduce(x, fcoll.subgroups(g, [[0, 2], [1]])), n=3)
    assert [line[3:] for line in lines(groups)] == [
        ["Σ", "0,2", "0", "→", "Σ", "0,2"],
        ["1", "1", "→", "1"],
        ["Σ", "0,2", "2", "→", "Σ", "0,2"],
    ]


def test_a_program_on_a_mesh() -> None:
    """A layer with its input cut over one axis and batches over the other."""

    def layer(x: Tensor, params: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
        y = fcoll.all_reduce(x * params["w"], "tp")
        return {
            "mean": fcoll.all_reduce(y, "dp", "mean"),
            "where": fcoll.axis_index(("dp", "tp")),
            "n": steps + x[0] * 0,
        }

    mesh = fcoll.virtual_mesh(dp=2, tp=2)
    flow = provenance.follow(
        layer, [("dp", 2), ("tp", 2)], (torch.zeros(2), {"w": torch.zeros(2)}, 7), ["x", "params", "steps"]
    )
    assert [(leaf.name, leaf.shape, leaf.differentiable) for leaf in (*flow.inputs, *flow.outputs)] == [
        ("x", (2,), True),
        ("params['w']", (2,), True),
        ("y['mean']", (2,), True),
        ("y['n']", (), True),
        ("y['where']", (), False),
    ]
    for rank, row in enumerate(flow.forward):
        assert {(t.rank, t.number) for t in row[0].terms} == {(r, k) for r in range(4) for k in (0, 2)}
        assert row[2] == Origin("sum", (), 7.0)
        assert row[3] == Origin("sum", (), float(rank))
    everyone = {(t.rank, t.number) for t in flow.backward[3][1].terms}
    assert everyone == {(r, 1) for r in range(4)}
    assert flow.backward[0][0].depends

    picture = fcoll.draw(layer, mesh)(torch.zeros(2), {"w": torch.zeros(2)}, 7)
    assert picture.title == "layer(x, params, steps), dp=2, tp=2"
    assert "dp 1, tp 0" in picture.text
    assert "params['w'].grad" in picture.text
    assert "= 7" in picture.text


def test_gradients_of_one_rank_within() -> None:
    """Whose cotangents: a declared replication does not sum, and a gradient can be drawn as a function too."""
    summed = fcoll.draw(lambda x, g: torch.func.grad(lambda x: fcoll.all_reduce(3 * x, g).sum())(x) * x, n=2)
    assert [line[-3:] for line in lines(summed)] == [["0", "→", "6·0"], ["1", "→", "6·1"]]
    once = fcoll.draw(
        lambda x, g: torch.func.grad(lambda x: fcoll.all_reduce(3 * x, g, invariant=True).sum())(x) * x, n=2
    )
    assert [line[-3:] for line in lines(once)] == [["0", "→", "3·0"], ["1", "→", "3·1"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_a_program(dtype: torch.dtype) -> None:
    """It runs in the dtypes that it is given, as it may hold tensors of its own."""
    w = torch.tensor([[1.0, 0.0], [0.5, -1.0]], dtype=dtype)
    flow = provenance.follow(lambda x: fcoll.all_reduce(x @ w, "i"), [("i", 2)], (torch.ones(2, dtype=dtype),), ["x"])
    assert torch.equal(factors(flow.forward, 2), w.T.double().repeat(2, 2))
    assert torch.equal(factors(flow.backward, 2), w.double().repeat(2, 2))


def test_where_a_function_is_not_defined() -> None:
    """Roots of negative numbers, and divisions by zero: what depends on what is found all the same."""

    def root(x: Tensor, group: str) -> Tensor:
        return torch.sqrt(fcoll.all_reduce(x, group) - 3)

    for f in (root, lambda x, g: x / fcoll.all_reduce(x, g)):
        assert " ".join(lines(fcoll.draw(f, n=2))[1][3:]) == "ƒ 0,1 1 → ƒ′ Σ 0,1"


def test_integers_and_random_numbers() -> None:
    mesh = fcoll.virtual_mesh(i=2)
    rolled = fcoll.draw(lambda x, k: x.roll(k.item() if isinstance(k, Tensor) else k), mesh)(torch.ones(3), 1)
    assert lines(rolled)[1] == ["1", "1a", "1b", "1c", "→", "1c", "1a", "1b", "1a", "1b", "1c", "→", "1b", "1c", "1a"]
    index = torch.tensor([2, 0])
    picked = fcoll.draw(lambda x, index: x[index], mesh)(torch.ones(3), index)
    assert lines(picked)[1] == ["1", "1a", "1b", "1c", "→", "1c", "1a", "1a", "1b", "→", "1b", "zero", "1a"]
    fcoll.draw(lambda x: fcoll.all_reduce(torch.nn.functional.dropout(x), "i"), mesh)(torch.ones(3))


# ---- who can read it


PICTURES: dict[str, Callable[[], fcoll.Picture]] = {
    "two ranks": lambda: fcoll.draw(fcoll.all_reduce, n=2),
    "sums": lambda: fcoll.draw(fcoll.all_gather, n=5),
    "words": lambda: fcoll.draw(fcoll.all_reduce, n=8, op="mean", shape=(3,)),
    "zeros": lambda: fcoll.draw(fcoll.reduce, n=3, dst=1),
    "no derivative": lambda: fcoll.draw(fcoll.argmax, n=3),
    "many ranks": lambda: fcoll.draw(fcoll.all_to_all, n=16),
    "a long row": lambda: fcoll.draw(fcoll.shift, n=2, shape=(40,)),
    "three axes": lambda: fcoll.draw(fcoll.shift, n=2, shape=(2, 3, 2)),
    "a mesh": lambda: fcoll.draw(_columns, fcoll.virtual_mesh(dp=2, tp=4))(torch.ones(2), torch.ones(2, 2)),
    "virtual mesh": lambda: fcoll.virtual_mesh(dp=2, tp=4).draw(),
    "virtual mesh of one axis": lambda: fcoll.virtual_mesh(some_name=3).draw(),
    "virtual mesh of three axes": lambda: fcoll.virtual_mesh(pp=2, dp=4, model=8).draw(),
    "spec": lambda: P("dp", ("tp",)).draw((8, 4), fcoll.virtual_mesh(dp=2, tp=4)),
    "spec with replicas": lambda: P(None, "dp").draw((4096, 65536), fcoll.virtual_mesh(dp=2, tp=4)),
    "spec of three axes": lambda: P("dp", None, "tp").draw((4, 2, 8), fcoll.virtual_mesh(dp=2, tp=4)),
    "trace": lambda: _trace().draw(),
    "trace of nothing": lambda: fcoll.trace(lambda x: x)(torch.ones(1)).draw(),
}  # fmt: skip


def _columns(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = fcoll.all_gather(x @ w, "tp")
    return fcoll.all_reduce(y, "dp"), fcoll.axis_index("tp")


def _trace() -> fcoll.Trace:
    def step(x: Tensor, w: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            return fcoll.all_reduce((fcoll.all_gather(w, "tp", 1) * x).sum(), "dp")

        return torch.func.grad(loss)(w)

    return fcoll.trace(step, fcoll.virtual_mesh(dp=16, tp=4))(torch.ones(64, 256), torch.ones(64, 64))


def elements(picture: fcoll.Picture, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture.svg).iter("{http://www.w3.org/2000/svg}" + tag))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_well_formed_and_nothing_overlaps(name: str) -> None:
    picture = PICTURES[name]()
    root = ElementTree.fromstring(picture.svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == picture.title
    (description,) = elements(picture, "desc")
    assert description.text == picture.text == repr(picture)

    boxes = [shape for shape in picture.shapes if isinstance(shape, svg.Box)]
    texts = []
    for label in picture.shapes:
        if isinstance(label, svg.Label):
            left = label.x - svg.width_of(label.text, label.size) * {"start": 0, "middle": 0.5, "end": 1}[label.anchor]
            texts.append(
                (left, label.y - label.size / 2, left + svg.width_of(label.text, label.size), label.y + label.size / 2)
            )
    for x0, y0, x1, y1 in [*texts, *((b.x, b.y, b.x + b.width, b.y + b.height) for b in boxes)]:
        assert min(x0, y0) >= 0, name
        assert x1 <= picture.width, name
        assert y1 <= picture.height, name
    for a, b in itertools.combinations(texts, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (name, a, b)
    if "trace" not in name:  # whose bars stand beside their labels
        for box in boxes:
            inside = [
                t
                for t in texts
                if t[0] >= box.x and t[2] <= box.x + box.width and box.y <= t[1] <= t[3] <= box.y + box.height
            ]
            assert len(inside) == 1, (name, box)  # no box has nothing but a colour
    for first, second in itertools.combinations(boxes, 2):
        assert any(
            b.x + b.width <= c.x + 0.01 or b.y + b.height <= c.y + 0.01 for b, c in ((first, second), (second, first))
        ), (name, first, second)


def test_colours_are_those_of_the_sources() -> None:
    """A cell of one colour for a copy, a bar of all for a sum; the ninth rank has the first one's, with an outline."""
    for shape, label in itertools.pairwise(fcoll.draw(fcoll.all_to_all, n=5).shapes):  # black on most, white on blue
        if isinstance(shape, svg.Box) and isinstance(label, svg.Label):
            assert (label.over,) == tuple(shape.colors)
    filled = [
        rect.attrib["fill"] for rect in elements(fcoll.draw(fcoll.shift, n=2), "rect") if rect.attrib["fill"] != "none"
    ]
    first, second = svg.PALETTE[:2]
    assert filled == [first, second, first, second, second, first, first, second, second, first]
    (total, _) = [s for s in fcoll.draw(fcoll.all_reduce, n=2).shapes if isinstance(s, svg.Box) and len(s.colors) == 2][
        :2
    ]
    assert [band[4] for band in svg.bands(total)] == [0, 1]
    assert sum(band[2] for band in svg.bands(total)) == pytest.approx(total.width)
    assert total.tip == "0 + 1"
    assert len(set(svg.PALETTE)) == 8
    assert svg.color_of(8) == svg.color_of(0)
    assert svg.inset(svg.Box(0, 0, 20, 20, (8,))) == (3, 3, 14, 14)
    assert svg.inset(svg.Box(0, 0, 20, 20, (7,))) is None


def test_labels_stand_out_from_their_colours() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for rank in range(8):
        low, high = sorted((luminance(svg.color_of(rank)), luminance(svg.ink_on(rank))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, rank  # WCAG 2, level AA


def test_light_and_dark() -> None:
    """A file follows the reader's theme; within a page, a picture has the colour of the page's text."""
    picture = fcoll.draw(fcoll.shift, n=2)
    assert "@media (prefers-color-scheme: dark) { .fcoll-picture { color: #e6edf3 } }" in picture.svg
    assert picture._repr_svg_() == picture.svg
    assert "<style>" not in picture._repr_html_()
    colors = {
        e.attrib[key]
        for tag in ("rect", "text", "path")
        for e in elements(picture, tag)
        for key in ("fill", "stroke")
        if key in e.attrib
    }
    assert colors == {"none", "currentColor", *svg.PALETTE[:2], "#000000"}
    assert 'fill="currentColor"' in picture.svg.split(">")[0]


def test_tips_tell_all() -> None:
    tips = {e.text for e in elements(fcoll.draw(fcoll.all_reduce, n=2, op="mean", shape=(2,)), "title")}
    assert "0.5·0a + 0.5·1a" in tips
    assert "zero: nothing comes here" in {e.text for e in elements(fcoll.draw(fcoll.reduce, n=2), "title")}
    assert "max of 0, 1" in {e.text for e in elements(fcoll.draw(fcoll.all_reduce, n=2, op="max"), "title")}
    escaped = fcoll.trace(lambda x: fcoll.all_reduce(x, "<&>"), fcoll.virtual_mesh(**{"<&>": 2}))(torch.ones(1)).draw()
    assert any("over <&>, 2 ranks" in str(e.text) for e in elements(escaped, "title"))


def test_saved_as_a_file(tmp_path: pathlib.Path) -> None:
    picture = fcoll.draw(fcoll.vary, n=2)
    picture.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == picture.svg
    with pytest.raises(CollectiveValueError, match=r"save: .*x.png does not end in .svg; for others: picture.plot"):
        picture.save(str(tmp_path / "x.png"))


def test_matplotlib_is_used_when_asked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    picture = fcoll.draw(fcoll.all_reduce, n=2)
    assert picture.svg
    with pytest.raises(ImportError):
        picture.plot()


def test_on_matplotlib_axes() -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    picture = fcoll.draw(fcoll.all_to_all, n=9)
    figure, (left, right) = pyplot.subplots(1, 2)
    assert picture.plot(ax=right) is right
    assert not left.texts
    assert [text.get_text() for text in right.texts] == [s.text for s in picture.shapes if isinstance(s, svg.Label)]
    boxes = [shape for shape in picture.shapes if isinstance(shape, svg.Box)]
    ninth = [box for box in boxes if box.colors == [8] or box.colors == (8,)]
    assert len(right.patches) == 2 * len(boxes) + len(ninth)
    figure.canvas.draw()
    own = fcoll.draw(fcoll.reduce, n=2).plot()
    width, height = own.figure.get_size_inches() * 72
    assert (width, height) == pytest.approx((fcoll.draw(fcoll.reduce, n=2).width, fcoll.draw(fcoll.reduce, n=2).height))
    assert own.texts[0].get_fontsize() == pytest.approx(13)
    own.figure.canvas.draw()
    pyplot.close("all")


# ---- meshes, specs, traces


def test_meshes() -> None:
    mesh = fcoll.virtual_mesh(dp=2, tp=3)
    assert mesh.draw().text == "VirtualMesh(dp=2, tp=3)\n\n   0  1  2\n0  0  1  2\n1  3  4  5"
    assert mesh._repr_html_() == mesh.draw()._repr_html_()
    assert fcoll.virtual_mesh(dp=4096)._repr_html_() == "<code>VirtualMesh(dp=4096)</code>"
    with pytest.raises(CollectiveValueError, match=r"VirtualMesh.draw: 65 ranks; a picture has room for 64"):
        fcoll.virtual_mesh(dp=65).draw()


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (P("a"), (4,)),
        (P(), (3, 2)),
        (P(None, "b"), (2, 6)),
        (P(("b", "a")), (6,)),
        (P("b", None, "a"), (3, 1, 2)),
        (P(), ()),
    ],
)
def test_specs_are_drawn_as_shard_map_cuts(spec: fcoll.P, shape: tuple[int, ...]) -> None:
    """Each rank owns the blocks that it sees in a shard_map."""
    mesh = fcoll.virtual_mesh(a=2, b=3)
    x = torch.arange(math.prod(shape)).reshape(shape)
    seen = fcoll.shard_map(lambda x: x.flatten()[None], mesh, spec, P(("a", "b")), check=False)(x)
    owners: dict[int, list[int]] = {}
    for rank, block in enumerate(seen.tolist()):
        owners.setdefault(block[0], []).append(rank)
    want = [svg.runs(owners[number]) for number in sorted(owners)]
    picture = spec.draw(shape, mesh)
    got = [s.text for s in picture.shapes if isinstance(s, svg.Label) and s.bold][1:]
    assert sorted(got) == sorted(want)
    if len(shape) < 3:
        assert got == want


def test_meshes_of_processes(ranks: Pools) -> None:
    """A DeviceMesh has its own ranks in its own order; a program is drawn on emulated ones."""

    def body() -> tuple[str, str]:
        mesh = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "tp"))
        drawn = fcoll.draw(lambda x: fcoll.shift(x, "dp"), mesh)(torch.ones(1))
        return P("dp").draw((4,), mesh).text, drawn.text

    for spec, program in ranks(2).run(body):
        assert spec == "P('dp') of shape (4,) over dp=2, tp=1\n\n  0:2  2:4\n  1    0"
        assert "1     dp 1, tp 0  1        →  0  1         →  0" in program


def test_specs_that_do_not_fit() -> None:
    mesh = fcoll.virtual_mesh(a=2, b=3)
    for spec, shape, message in (
        (P("a", "b"), (4,), r"P.draw: shape \(4,\) has fewer axes than P\('a', 'b'\) has entries"),
        (P("c"), (4,), r"P.draw: P\('c'\) names 'c', which is no axis of the mesh \('a', 'b'\)"),
        (
            P(("a", "b")),
            (9,),
            r"P.draw: size 9 of axis 0 is not a multiple of the 6 ranks that .* cuts it among; pad it",
        ),
    ):
        with pytest.raises(CollectiveValueError, match=message):
            spec.draw(shape, mesh)
    with pytest.raises(CollectiveValueError, match=r"P.draw: 128 ranks; a picture has room for 64"):
        P("a").draw((128,), fcoll.virtual_mesh(a=128))
    with pytest.raises(CollectiveTypeError, match=r"P.draw: a mesh is what fcoll.mesh"):
        P("a").draw((4,), "mesh")  # type: ignore[arg-type]
    assert layouts.RANKS == 64


def test_traces() -> None:
    trace = _trace()
    picture = trace.draw()
    assert picture.title == f"{len(trace)} collectives, {trace.time() * 1e6:.3g} µs one after the other"
    assert [line.split()[0] for line in picture.text.splitlines()[1:]] == list(trace.totals())
    tips = [str(e.text) for e in elements(picture, "title")]
    for i, record in enumerate(trace):
        (tip,) = [
            tip for tip in tips if tip.startswith(f"{i}: {record.collective} over {record.axis}, {record.n} ranks")
        ]
        assert record.phase in tip
        assert record.source in tip
    boxes = [shape for shape in picture.shapes if isinstance(shape, svg.Box)]
    blocks, bars = boxes[: len(trace)], boxes[len(trace) :]
    for before, after in itertools.pairwise(blocks):
        assert before.x + before.width == pytest.approx(after.x)
    totals = [total[key] for total in trace.totals().values() for key in ("payload", "ring", "direct")]
    assert [bar.width / bars[0].width for bar in bars] == pytest.approx(
        [t / totals[0] for t in totals], rel=0.01, abs=0.1
    )
    slow = trace.draw(latency={"dp": 1.0, "tp": 0.0})
    assert slow.title.endswith(" s one after the other")
    assert "<svg" in trace._repr_html_()
    assert "<svg" not in fcoll.trace(lambda x: x)(torch.ones(1))._repr_html_()


# ---- what cannot be drawn


MESH = fcoll.virtual_mesh(i=2)
draw: Any = fcoll.draw  # calls that its annotations refuse
VALUE, TYPE = CollectiveValueError, CollectiveTypeError


def program(f: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    return lambda: draw(f, MESH)(x)


X = torch.ones(3)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (lambda: draw(3, n=2), TYPE, "draw: f is a function, got int"),
    "neither": (lambda: draw(fcoll.vary), VALUE, "draw: give n for a collective, as in .*, or a mesh for one rank's"),
    "both": (lambda: draw(fcoll.vary, MESH, n=2), VALUE, "draw: give n for a collective"),
    "no number of ranks": (lambda: draw(fcoll.vary, n="i"), TYPE, "draw: n is an integer, got str"),
    "no ranks": (lambda: draw(fcoll.vary, n=0), VALUE, "draw: n is at least 1, got 0"),
    "a number for a shape": (lambda: draw(fcoll.vary, n=2, shape=3), TYPE, "draw: shape is a tuple of integers, got 3"),
    "nothing to draw": (lambda: draw(fcoll.vary, n=2, shape=(2, 0)), VALUE, r"draw: the sizes in shape are at least 1"),
    "no mesh": (lambda: draw(fcoll.vary, 4), TYPE, "draw: a mesh is what fcoll.mesh"),
    "options with a mesh": (
        lambda: draw(fcoll.all_gather, MESH, axis=1, shape=(2, 2)),
        VALUE,
        "draw: axis, shape: only with n; with a mesh, give arguments to the function that draw returns",
    ),
    "many ranks": (lambda: draw(fcoll.vary, n=17), VALUE, "draw: 17 ranks; a picture has room for 16"),
    "many numbers": (
        lambda: draw(fcoll.vary, n=2, shape=(65,)),
        VALUE,
        "draw: the arguments have 65 numbers on each of 2 ranks; a picture has room for 64 on each, and 256 in all",
    ),
    "many results": (
        lambda: draw(fcoll.all_gather, n=8, shape=(9,)),
        VALUE,
        "draw: the results have 72 numbers on each of 8 ranks",
    ),
    "nothing to follow": (
        program(lambda x: x, torch.ones(3, dtype=torch.int64)),
        TYPE,
        "draw: no argument is a floating-point tensor, whose numbers could be followed",
    ),
    "complex numbers": (
        program(lambda x: x, [torch.ones(3, dtype=torch.complex64)]),
        TYPE,
        r"draw: args\[0\]\[0\] is torch.complex64; give a real one",
    ),
    "complex results": (program(lambda x: 1j * x, X), TYPE, "draw: out is torch.complex64"),
    "other results": (program(lambda x: {"a": "b"}, X), TYPE, r"draw: out\['a'\] of the result is a str"),
    "no results": (program(lambda x: None, X), VALUE, "draw: the function returns no numbers"),
    "never a number": (
        program(lambda x: torch.log(-(x**2) - 1), X),
        VALUE,
        "draw: y is NaN whatever goes in, from -7.5",
    ),
    "what the collective refuses": (lambda: draw(fcoll.reduce, n=2, op="avg"), VALUE, "reduce: op is one of"),
    "a shape that it refuses": (
        lambda: draw(fcoll.all_to_all, n=2, shape=(3,)),
        VALUE,
        r"all_to_all: tree has shape \(3,\): size 3 along split_axis=0 is not a multiple of the 2 ranks",
    ),
    "another name": (program(lambda x: fcoll.vary(x, "tp"), X), UnboundAxisError, "axis name 'tp' is not bound"),
    "control flow": (program(lambda x: x if x.sum() > 0 else -x, X), RuntimeError, "data-dependent control flow"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_the_smallest_shape_that_the_collective_takes() -> None:
    shapes = {
        (): fcoll.draw(fcoll.vary, n=3, shape=()),
        (1,): fcoll.draw(fcoll.shift, n=3),
        (3,): fcoll.draw(fcoll.reduce_scatter, n=3),
        (3, 1): fcoll.draw(fcoll.all_to_all, n=3, concat_axis=1),
        (1, 3): fcoll.draw(fcoll.split, n=3, axis=1),
    }
    for shape, picture in shapes.items():
        chips = 3
        boxes = [s for s in picture.shapes if isinstance(s, svg.Box)]
        assert len(boxes) >= chips + 3 * 4 * (math.prod(shape) // 3 or 1)
    assert shapes[3, 1].text.count("0c") == 4
