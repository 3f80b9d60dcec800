"""The pools of ranks, which live through the session, and the substrates that every test body runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from places import Place

from fcoll.testing import Emulated, Processes, Ranks, Substrate

SIZES = (2, 3, 4)
LONG = {  # whole modules that take minutes together: `make thorough` runs them, and CI
    "test_bench_command", "test_benchmarks", "test_compat", "test_determinism", "test_faults", "test_fuzz",
    "test_optimize_programs", "test_p2p", "test_races", "test_regions", "test_selfcheck", "test_soak", "test_uneven",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in LONG:
            item.add_marker("long")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: the session's pool of n ranks, started when first used."""
    pools: dict[int, Ranks] = {}

    def pool(n: int) -> Ranks:
        return pools.setdefault(n, Ranks(n))

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(params=[(kind, n) for kind in ("emulated", "gloo") for n in SIZES], ids=lambda p: f"{p[0]}-{p[1]}")
def substrate(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Substrate:
    kind, n = request.param
    return Emulated(n) if kind == "emulated" else Processes(ranks(n))


@pytest.fixture(params=["virtual", "gloo"])
def place(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Place:
    """See `places.Place`."""
    return Place(request.param, ranks)
