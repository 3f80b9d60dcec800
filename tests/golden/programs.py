"""The golden whole programs, as one rank runs them: written with the names of `jax.lax`, as they were there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll import lax
from golden.cases import Level

Case = dict[str, Any]
Values = dict[str, Tensor]
Program = Callable[..., tuple[Tensor, Values]]


def program(case: Case, groups: Callable[[Any], Any]) -> Program:
    """This rank's values by name → the loss, and the further outputs by name."""
    names = [name for name, _ in case["axes"]]
    return functools.partial(PROGRAMS[case["name"]], case["params"], *[groups(name) for name in names], groups)


def megatron_mlp(params: Any, tp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    y = lax.psum(torch.tanh(v["x"] @ v["w1"] + v["b1"]) @ v["w2"], tp) + v["b2"]
    return ((y - v["t"]) ** 2).mean(), {"y": y}


def dp_tp_mlp(params: Any, dp: Any, tp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    o = lax.psum(torch.tanh(v["x"] @ v["w1"]) @ v["w2"], tp) + v["b"]
    return lax.pmean(((o - v["y"]) ** 2).mean(), dp), {"o": o}


def fsdp_mlp(params: Any, dp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    w1, w2 = (lax.all_gather(v[name], dp, tiled=True) for name in ("w1", "w2"))
    return lax.pmean(((torch.tanh(v["x"] @ w1) @ w2 - v["y"]) ** 2).mean(), dp), {}


def ring_attention(params: Any, sp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    """K and V go round, and the softmax is put together online."""
    q, n, rank = v["q"], lax.axis_size(sp), lax.axis_index(sp)
    length, width = q.shape
    block = {"k": v["k"], "v": v["v"]}
    top = q.new_full((length,), -torch.inf)
    total, weighted = q.new_zeros(length), torch.zeros_like(q)
    steps = torch.arange(length)
    for step in range(n):
        scores = q @ block["k"].T / width**0.5
        if params["causal"]:
            owner = (rank - step) % n
            allowed = (rank * length + steps)[:, None] >= (owner * length + steps)[None, :]
            scores = torch.where(allowed, scores, -torch.inf)
        higher = torch.maximum(top, scores.amax(1))
        rescale, weights = torch.exp(top - higher), torch.exp(scores - higher[:, None])
        total = total * rescale + weights.sum(1)
        weighted = weighted * rescale[:, None] + weights @ block["v"]
        top = higher
        if step < n - 1:
            block = lax.ppermute(block, sp, params["perm"])
    y = weighted / total[:, None]
    return lax.psum((y * v["g"]).sum(), sp), {"y": y}


def flash_decode_combine(params: Any, i: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    scores = v["q"] @ v["k"].T
    top = lax.pmax(scores.detach().amax(1, keepdim=True), i)
    weights = torch.exp(scores - top)
    y = lax.psum(weights @ v["v"], i) / lax.psum(weights.sum(1, keepdim=True), i)
    return (y * v["g"]).sum(), {"y": y}


def clip(params: Any, dp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    img, txt = (torch.nn.functional.normalize(x, dim=1) for x in (v["im"] @ v["wi"], v["tx"] @ v["wt"]))
    labels = lax.axis_index(dp) * len(img) + torch.arange(len(img))
    scale = torch.exp(v["s"])

    def entropy(mine: Tensor, others: Tensor) -> Tensor:
        logits = scale * mine @ lax.all_gather(others, dp, tiled=True).T
        return -logits.log_softmax(1).gather(1, labels[:, None]).mean()

    return lax.pmean(0.5 * (entropy(img, txt) + entropy(txt, img)), dp), {"img": img, "txt": txt}


def moe_all_to_all(params: Any, ep: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    capacity = params["capacity_per_rank_and_expert"]
    chances = (v["x"] @ v["wr"]).softmax(1)
    gate, choice = chances.max(1)
    chosen = (choice[:, None] == torch.arange(params["experts"])).to(torch.int64)
    place = (chosen.cumsum(0) * chosen).sum(1) - 1  # among this rank's tokens of that expert
    slot = place[:, None] == torch.arange(capacity)  # tokens over capacity have none
    mask = (chosen[:, :, None] * slot[:, None, :]).to(v["x"].dtype)  # token, expert, slot
    sent = torch.einsum("tec,td->ecd", mask, v["x"])
    arrived = lax.all_to_all(sent, ep, 0, 1, tiled=True)
    done = torch.tanh(arrived @ v["w1"]) @ v["w2"]
    back = lax.all_to_all(done, ep, 1, 0, tiled=True)
    y = gate[:, None] * torch.einsum("tec,ecd->td", mask, back)
    loss = lax.pmean(((y - v["t"]) ** 2).mean(), ep)
    return loss, {"y": y, "dispatched": sent, "kept": mask.sum((1, 2))}


def sync_batch_norm(params: Any, dp: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    x, momentum = v["x"], params["momentum"]
    mean = lax.pmean(x.mean(0), dp)
    if params["stats"] == "pmean((x-mean)**2)":
        var = lax.pmean(((x - mean) ** 2).mean(0), dp)
    else:
        var = lax.pmean((x * x).mean(0), dp) - mean**2
    y = (x - mean) / torch.sqrt(var + params["eps"]) * v["gamma"] + v["beta"]
    count = len(x) * lax.psum(1, dp)
    running_var = (1 - momentum) * 1 + momentum * var * count / (count - 1)
    aux = {"y": y, "mean": mean, "var": var, "running_mean": momentum * mean, "running_var": running_var}
    return lax.psum((y * v["g"]).sum(), dp), aux


def cannon_matmul(params: Any, a: Any, b: Any, groups: Any, v: Values) -> tuple[Tensor, Values]:
    both, n = groups(["a", "b"]), lax.axis_size(a)
    left = lax.ppermute(v["A"], both, params["skew_A"])
    right = lax.ppermute(v["B"], both, params["skew_B"])
    one_on = [(rank, (rank - 1) % n) for rank in range(n)]
    product = left @ right
    for _ in range(n - 1):
        left, right = lax.ppermute(left, b, one_on), lax.ppermute(right, a, one_on)
        product = product + left @ right
    return lax.psum((product * v["G"]).sum(), both), {"C": product}


def dp_sgd_trajectory(params: Any, dp: Any, groups: Any, v: Values) -> Values:
    """Differentiated inside: every rank's own gradient, averaged."""

    def loss(weights: tuple[Tensor, Tensor]) -> Tensor:
        w, b = weights
        return ((torch.tanh(v["x"] @ w + b) - v["y"]) ** 2).mean()

    weights = (v["w"], v["b"])
    steps: list[Values] = []
    for _ in range(params["steps"]):
        gradients, value = torch.func.grad_and_value(loss)(weights)
        gradients = lax.pmean(gradients, dp)
        w, b = (weight - params["lr"] * gradient for weight, gradient in zip(weights, gradients, strict=True))
        weights = (w, b)
        steps.append({"loss": lax.pmean(value, dp), "w": w, "b": b})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        megatron_mlp,
        dp_tp_mlp,
        fsdp_mlp,
        ring_attention,
        flash_decode_combine,
        clip,
        moe_all_to_all,
        sync_batch_norm,
        cannon_matmul,
        dp_sgd_trajectory,
    )
}


# ---- differentiated


def loss_and_gradients(f: Program, wrt: list[str], v: Values) -> tuple[Tensor, Values, Values]:
    """In one rank's program: the loss, the further outputs, and the gradients."""
    held = {name: value for name, value in v.items() if name not in wrt}
    chosen = {name: v[name] for name in wrt}
    gradients, (loss, aux) = torch.func.grad_and_value(lambda p: f({**held, **p}), has_aux=True)(chosen)
    return loss, aux, gradients


def second_order(f: Program, wrt: list[str], v: Values) -> Values:
    """The gradient of the sum of the squares of all gradients."""

    def squares(chosen: Values) -> Tensor:
        gradients = loss_and_gradients(f, wrt, {**v, **chosen})[2]
        return torch.stack([(gradient**2).sum() for gradient in gradients.values()]).sum()

    found: Values = torch.func.grad(squares)({name: v[name] for name in wrt})
    return found


# ---- on a mesh


def levels(case: Case) -> list[Level]:
    """The mesh axes as maps, for `cases.of_world`."""
    return [Level(name, n, None, None) for name, n in case["axes"]]


def places(case: Case) -> list[tuple[int, ...]]:
    """Each rank's indices along the mesh axes."""
    return list(itertools.product(*(range(n) for _, n in case["axes"])))
