"""Many drawn programs, optimised and not, on 4 gloo ranks: `python tests/optimize_soak.py 2000`.

Prints how many were drawn, how many were rewritten, how many messages that saved, and every difference.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter

import drawn

from fcoll import Plan
from fcoll.testing import Ranks

BATCH = 20


def undigested(plans: list[Plan]) -> list[Plan]:
    """Without what differs where the graphs do."""
    return [plan._replace(digest="") for plan in plans]


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    skip = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    programs = drawn.drawn(count)[skip:]
    pool, start = Ranks(4, timeout=600), time.monotonic()
    wrong: list[str] = []
    plans = []
    for i in range(0, len(programs), BATCH):
        results = pool.run(drawn.differences, programs[i : i + BATCH])
        wrong += [text for texts, _ in results for text in texts]
        plans += results[0][1]
        assert all(undigested(result[1]) == undigested(results[0][1]) for result in results), (
            "ranks have different plans"
        )
        print(f"{len(plans)} programs, {len(wrong)} differences, {time.monotonic() - start:.0f} s", flush=True)
    pool.close()
    rewritten = [plan for plan in plans if plan.after < plan.before]
    before, after = sum(plan.before for plan in plans), sum(plan.after for plan in plans)
    print(*wrong, sep="\n")
    kinds = Counter(
        re.sub(r"\b\w+_\d+\b|\b(all|reduce|scatter|gather)_\w+\b", "_", line) for plan in plans for line in plan.reasons
    )
    print(*[f"{n:6} {kind}" for kind, n in kinds.most_common()], sep="\n")
    print(f"{len(plans)} programs, of which {len(rewritten)} were rewritten: {before} messages became {after}")
    print(f"{len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
