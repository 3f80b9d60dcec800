"""Meshes of processes and virtual ones, and `fcoll.bind`: which group a name is, where, and for how long."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import Pools, vjp
from places import made
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fcoll

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

PROGRAM = """
import os
import torch, torch.distributed as dist
import fcoll

def main():  # torch's processes may abort at their end if a DeviceMesh outlives torch.distributed
    assert not dist.is_initialized()
    mesh = fcoll.mesh(dp=1, tp=int(os.environ["WORLD_SIZE"]))
    again = fcoll.mesh(all=dist.get_world_size())  # torch.distributed runs already
    with fcoll.bind(mesh):
        x = fcoll.all_reduce(torch.tensor(10.0) ** dist.get_rank(), ("dp", "tp"))
    if dist.get_rank() == 0:
        print((type(mesh).__name__, mesh.mesh_dim_names, tuple(mesh.shape), again.size(), mesh.device_type, int(x)))

main()
dist.destroy_process_group()
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, whatever runs the tests."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()


def ours() -> Tensor:
    """1, 10, 100, ... by rank: a sum of them tells whose they are."""
    return torch.tensor(10.0, dtype=torch.float64) ** dist.get_rank()


def total(*ranks: int) -> float:
    return float(sum(10**rank for rank in ranks))


# ---- fcoll.mesh and fcoll.virtual_mesh


def test_without_a_launcher_a_mesh_is_virtual(alone: None) -> None:
    mesh = fcoll.mesh(dp=2, tp=4)
    assert isinstance(mesh, fcoll.VirtualMesh)
    assert mesh == fcoll.virtual_mesh(dp=2, tp=4)
    assert mesh != fcoll.virtual_mesh(tp=4, dp=2)
    assert hash(mesh) == hash(fcoll.virtual_mesh(dp=2, tp=4))
    assert repr(mesh) == "VirtualMesh(dp=2, tp=4)"
    assert fcoll.virtual_mesh(i=1024, j=1024).size() == 2**20


def test_a_rank_alone_is_no_launcher(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert isinstance(fcoll.mesh(i=2), fcoll.VirtualMesh)


def python(*command: str, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **env}
    run = subprocess.run([sys.executable, *command], env=kept, text=True, capture_output=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_under_a_launcher_of_one_rank() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert python("-c", PROGRAM, **env) == "('DeviceMesh', ('dp', 'tp'), (1, 1), 1, 'cpu', 1)\n"


def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out = python(*TORCHRUN, str(tmp_path / "program.py"))
    assert out == "('DeviceMesh', ('dp', 'tp'), (1, 2), 2, 'cpu', 11)\n"


def test_where_torch_distributed_runs(ranks: Pools) -> None:
    def body() -> None:
        with mock.patch.dict(os.environ):  # as where no launcher has named the ranks
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
            mesh = fcoll.mesh(dp=2, tp=2)
        assert isinstance(mesh, DeviceMesh)
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh.device_type == "cpu"
        assert isinstance(fcoll.virtual_mesh(dp=2, tp=2), fcoll.VirtualMesh)

    ranks(4).run(body)


def test_a_virtual_mesh_answers_as_a_mesh_of_processes_does(ranks: Pools) -> None:
    def answers(mesh: Any) -> list[Any]:
        sizes = [mesh.size(), mesh.size(0), mesh.size(1), mesh.size(-1)]
        return [tuple(mesh.mesh_dim_names), tuple(mesh.shape), mesh.ndim, *sizes]

    want = [("dp", "tp"), (2, 2), 2, 4, 2, 2, 2]
    assert answers(fcoll.virtual_mesh(dp=2, tp=2)) == want
    assert ranks(4).run(lambda: answers(made(dp=2, tp=2))) == [want] * 4


def test_a_size_that_is_not_the_worlds(alone: None, monkeypatch: pytest.MonkeyPatch, ranks: Pools) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = "mesh: mesh(dp=2, tp=4) makes 8 ranks, but {} are running; change the sizes or the launch"
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        fcoll.mesh(dp=2, tp=4)
    assert str(raised.value) == text.format(3)
    assert not dist.is_initialized()

    with pytest.raises(fcoll.CollectiveValueError) as raised:
        ranks(2).run(lambda: fcoll.mesh(dp=2, tp=4))
    assert str(raised.value) == text.format(2)


@pytest.mark.parametrize("function", ["mesh", "virtual_mesh"])
def test_sizes_that_cannot_be(alone: None, function: str) -> None:
    make = getattr(fcoll, function)
    with pytest.raises(ValueError, match=rf"^{function}: give at least one axis, as in {function}\(dp=2\)$"):
        make()
    for size in (0, -2):
        with pytest.raises(ValueError, match=rf"^{function}: the size of 'tp' is at least 1, got {size}$"):
            make(dp=2, tp=size)
    for value, kind in ((2.0, "float"), ("2", "str"), (True, "bool"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"^{function}: the size of 'dp' is an integer, got {kind}$"):
            make(dp=value)


# ---- fcoll.bind


def test_names_are_groups_inside_the_context_only(ranks: Pools) -> None:
    def body() -> None:
        mesh = made(dp=2, tp=2)
        dp, tp = divmod(dist.get_rank(), 2)
        with fcoll.bind(mesh) as nothing:
            assert nothing is None
            assert fcoll.all_reduce(ours(), "dp") == total(tp, tp + 2)
            assert fcoll.all_reduce(ours(), "tp") == total(2 * dp, 2 * dp + 1)
            assert (int(fcoll.axis_index("dp")), int(fcoll.axis_index("tp"))) == (dp, tp)
            assert (fcoll.axis_size("dp"), fcoll.axis_size(("tp", "dp"))) == (2, 4)
        with pytest.raises(NameError, match=r"^all_reduce: axis name 'dp' is not bound; call it inside"):
            fcoll.all_reduce(ours(), "dp")
        with fcoll.bind(mesh), pytest.raises(NameError) as raised:
            fcoll.all_reduce(ours(), "pp")
        assert str(raised.value) == "all_reduce: axis name 'pp' is not bound; bound here: ['tp', 'dp']"

    ranks(4).run(body)


def test_a_tuple_of_names_counts_in_its_own_order(ranks: Pools) -> None:
    def body() -> None:
        dp, tp = divmod(dist.get_rank(), 2)
        x = torch.tensor([dist.get_rank()])
        with fcoll.bind(made(dp=2, tp=2)):
            assert int(fcoll.axis_index(("dp", "tp"))) == 2 * dp + tp
            assert int(fcoll.axis_index(("tp", "dp"))) == 2 * tp + dp
            assert fcoll.all_gather(x, ("dp", "tp")).tolist() == [0, 1, 2, 3]
            assert fcoll.all_gather(x, ("tp", "dp")).tolist() == [0, 2, 1, 3]
            assert fcoll.broadcast(x, ("tp", "dp"), src=1).item() == 2
            assert fcoll.shift(x, ("tp", "dp")).item() == [3, 2, 0, 1][dist.get_rank()]
            assert fcoll.all_reduce(ours(), ("tp", "dp")) == total(0, 1, 2, 3)
            assert fcoll.all_reduce(ours(), ()) == ours()
            halves = fcoll.reduce_scatter(torch.arange(4) * 10**dp, ("tp", "dp"))
            assert halves.item() == (2 * tp + dp) * 22

    ranks(4).run(body)


def test_a_mesh_of_three_axes(ranks: Pools) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        a, c = divmod(dist.get_rank(), 2)
        with fcoll.bind(mesh):
            x = torch.tensor([dist.get_rank()])
            assert fcoll.all_gather(x, "b").tolist() == [dist.get_rank()]
            assert fcoll.all_gather(x, ("c", "b", "a")).tolist() == [0, 2, 1, 3]
            assert fcoll.all_gather(x, ("a", "b")).tolist() == [c, c + 2]
            assert fcoll.all_gather(x, ("b", "c")).tolist() == [2 * a, 2 * a + 1]
        with fcoll.bind(mesh["c"]):  # a part of a mesh is one
            assert fcoll.all_gather(x, "c").tolist() == [2 * a, 2 * a + 1]

    ranks(4).run(body)


def test_bindings_nest_and_the_innermost_counts(ranks: Pools) -> None:
    def body() -> None:
        dp, tp = divmod(dist.get_rank(), 2)
        everybody = total(0, 1, 2, 3)
        with fcoll.bind(made(i=4)):
            assert fcoll.all_reduce(ours(), "i") == everybody
            with fcoll.bind(made(i=2, j=2)):
                assert fcoll.all_reduce(ours(), "i") == total(tp, tp + 2)
                with fcoll.bind(made(j=4)):
                    assert fcoll.all_reduce(ours(), "j") == everybody
                    assert fcoll.all_reduce(ours(), "i") == total(tp, tp + 2)
                    with pytest.raises(ValueError, match=r"^all_reduce: the names \('i', 'j'\) are not axes of one"):
                        fcoll.all_reduce(ours(), ("i", "j"))
                assert fcoll.all_reduce(ours(), "j") == total(2 * dp, 2 * dp + 1)
                assert fcoll.all_reduce(ours(), ("i", "j")) == everybody
            assert fcoll.all_reduce(ours(), "i") == everybody

    ranks(4).run(body)


def test_an_emulated_axis_inside_and_outside_a_binding(ranks: Pools) -> None:
    def body() -> None:
        x = ours().expand(3)
        with fcoll.bind(made(i=2)):
            inner = fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(x)
            assert inner.tolist() == [3 * float(ours())] * 3
            both = fcoll.vmap(lambda x: fcoll.all_reduce(fcoll.all_reduce(x, "i"), "j"), axis_name="j")(x)
            assert both.tolist() == [3 * total(0, 1)] * 3

        @functools.partial(fcoll.vmap, axis_name="i")
        def around(x: Tensor) -> Tensor:
            with fcoll.bind(made(i=2)):
                return fcoll.all_reduce(x, "i")

        assert around(x).tolist() == [total(0, 1)] * 3

    ranks(2).run(body)


def test_a_binding_ends_with_an_exception_and_can_be_used_again(ranks: Pools) -> None:
    def body() -> None:
        binding = fcoll.bind(made(i=2))
        with pytest.raises(RuntimeError, match=r"^on purpose$"), binding:
            raise RuntimeError("on purpose")
        with pytest.raises(NameError):
            fcoll.axis_size("i")
        with binding:
            with pytest.raises(ValueError, match="src=7"), binding:
                fcoll.broadcast(ours(), "i", src=7)
            assert fcoll.all_reduce(ours(), "i") == total(0, 1)
        with pytest.raises(NameError):
            fcoll.axis_size("i")

    ranks(2).run(body)


def test_as_a_decorator(ranks: Pools) -> None:
    def body() -> None:
        @fcoll.bind(made(i=2))
        def mine(x: Tensor, *, depth: int = 0) -> Tensor:
            """Sums."""
            y = fcoll.all_reduce(x, "i")
            return mine(y, depth=depth - 1) if depth else y

        assert (mine.__name__, mine.__doc__) == ("mine", "Sums.")
        assert mine(ours()) == total(0, 1)
        assert mine(ours(), depth=2) == 4 * total(0, 1)
        assert torch.func.grad(mine)(ours()) == 2
        with pytest.raises(ValueError, match="src=7"):
            fcoll.bind(made(i=2))(lambda x: fcoll.broadcast(x, "i", src=7))(ours())
        with pytest.raises(NameError):
            fcoll.axis_size("i")

    ranks(2).run(body)


def test_what_cannot_be_bound(ranks: Pools) -> None:
    with pytest.raises(TypeError) as raised:
        fcoll.bind(fcoll.virtual_mesh(dp=2))
    text = "bind: VirtualMesh(dp=2) has no values of this rank's own; use fcoll.shard_map"
    assert str(raised.value) == text
    with pytest.raises(TypeError) as raised:
        fcoll.bind("dp")  # type: ignore[arg-type]
    kinds = "fcoll.mesh, fcoll.virtual_mesh or torch's init_device_mesh"
    assert str(raised.value) == f"bind: a mesh is what {kinds} make, got str"

    def body() -> None:
        with pytest.raises(TypeError) as raised:
            fcoll.bind(init_device_mesh("cpu", (2,)))
        remedy = "make it with mesh_dim_names=(...)"
        assert str(raised.value) == f"bind: the axes of the DeviceMesh have no names; {remedy}"
        first = DeviceMesh("cpu", [0], mesh_dim_names=("i",))
        if dist.get_rank() == 0:
            with fcoll.bind(first):
                assert fcoll.all_reduce(ours(), "i") == 1
        else:
            with pytest.raises(TypeError, match=r"^bind: this rank is not in DeviceMesh"):
                fcoll.bind(first)

    ranks(2).run(body)


# ---- derivatives, when the binding has ended


def loss(x: Tensor) -> Tensor:
    """Rank r's gradient of it, of the sum over the ranks: 2 Σ y over its group."""
    return fcoll.all_reduce(x, "i").square().sum()


def test_backward_after_the_binding_and_on_another_thread(ranks: Pools) -> None:
    def body() -> None:
        want = 4 * total(0, 1)
        for elsewhere in (False, True):
            x = ours().requires_grad_()
            with fcoll.bind(made(i=2)):
                y = loss(x)
                _, pull = vjp(loss, ours())
            if elsewhere:
                thread = threading.Thread(target=y.backward)
                thread.start()
                thread.join()
            else:
                y.backward()
            assert x.grad == want
            assert pull(torch.ones_like(y))[0] == want
            with fcoll.bind(made(i=2)):
                y = loss(x)
            with fcoll.bind(made(j=2)), fcoll.bind(made(i=1, k=2)):  # what "i" means by now does not matter
                (g,) = torch.autograd.grad(y, x, create_graph=True)
            assert g == want
            (gg,) = torch.autograd.grad(g, x)
            assert gg == 8

    ranks(2).run(body)


def test_bindings_are_of_one_thread(ranks: Pools) -> None:
    def body() -> None:
        seen: list[str] = []

        def look() -> None:
            try:
                fcoll.axis_size("i")
            except NameError as error:
                seen.append(str(error))

        with fcoll.bind(made(i=2)):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert len(seen) == 1
        assert "'i' is not bound" in seen[0]

    ranks(2).run(body)


def test_checkpoint_recomputes_with_the_binding_in_it(ranks: Pools) -> None:
    def body() -> None:
        def run(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            y: Tensor = checkpoint(f, x, use_reentrant=False)
            return y

        x = ours().requires_grad_()
        run(fcoll.bind(made(i=2))(loss), x).backward()
        assert x.grad == 4 * total(0, 1)

        x = ours().requires_grad_()
        with fcoll.bind(made(i=2)):
            run(loss, x).backward()
        assert x.grad == 4 * total(0, 1)

        with fcoll.bind(made(i=2)):
            y = run(loss, x)
        with pytest.raises(NameError, match="axis name 'i' is not bound"):  # f runs again, without its names
            y.backward()

    ranks(2).run(body)


# ---- compiled


def test_a_mesh_is_not_kept(ranks: Pools) -> None:
    """What is bound to it keeps it. A process may abort at its end if one outlives torch.distributed."""

    def body() -> None:
        mesh = fcoll.mesh(i=2)
        gone = weakref.ref(mesh)
        with fcoll.bind(mesh):
            fcoll.all_reduce(ours(), ("i",))
        total_of = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), mesh, fcoll.P("i"), fcoll.P())
        assert total_of(torch.arange(2)).item() == 1
        del mesh, total_of
        gc.collect()
        assert gone() is None

        @fcoll.bind(fcoll.mesh(i=2))
        def decorated(x: Tensor) -> Tensor:
            return fcoll.all_reduce(x, "i")

        traced = fcoll.trace(decorated, fcoll.mesh(j=2))
        gc.collect()
        assert decorated(ours()) == total(0, 1)
        assert traced(ours()).totals().keys() == {"i"}
        with fcoll.bind(fcoll.mesh(i=2)):
            gc.collect()
            assert fcoll.all_reduce(ours(), "i") == total(0, 1)

    ranks(2).run(body)


class Counter:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_a_rebind_is_never_answered_from_a_graph_of_another_mesh(ranks: Pools) -> None:
    def body() -> None:
        tp = dist.get_rank() % 2
        torch.compiler.reset()
        counter = Counter()
        ambient = torch.compile(lambda x: fcoll.all_reduce(x, "i"), fullgraph=True, backend=counter)
        everybody, column = total(0, 1, 2, 3), total(tp, tp + 2)
        for graphs, mesh, want in (
            (1, made(i=4), everybody),
            (2, made(i=2, j=2), column),
            (2, made(i=4), everybody),
            (2, made(i=2, j=2), column),
            (3, made(j=2, i=2), total(dist.get_rank() - tp, dist.get_rank() - tp + 1)),  # same name, same size
        ):
            with fcoll.bind(mesh):
                assert ambient(ours()) == want
            assert counter.graphs == graphs
        with fcoll.bind(made(i=4)), fcoll.bind(made(i=2, j=2)):
            assert ambient(ours()) == column
        with pytest.raises(NameError, match="axis name 'i' is not bound"):
            ambient(ours())

        @functools.partial(torch.compile, fullgraph=True, backend=Counter())
        def given(mesh: Any, x: Tensor) -> Tensor:
            with fcoll.bind(mesh):
                x = fcoll.all_reduce(x, "i")
            return x

        assert given(made(i=4), ours()) == everybody
        assert given(made(i=2, j=2), ours()) == column
        assert given(made(i=4), ours()) == everybody

        @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
        @fcoll.bind(made(i=2, j=2))
        def decorated(x: Tensor) -> Tensor:
            g: Tensor = torch.func.grad(loss)(x)
            return g + fcoll.axis_index(("j", "i"))

        with fcoll.bind(made(i=4)):
            assert decorated(ours()) == 4 * column + (0, 2, 1, 3)[dist.get_rank()]

    ranks(4).run(body)
