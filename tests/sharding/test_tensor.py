"""A sharded tensor is like the whole one, or says that it is not."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

import flagstone as fs
from sharded import net, shard

# What is done to a parameter and a tensor of its shape; results are compared with those of the plain model.
SAME = {
    "pointwise": lambda p, q: (p * 2 + q).abs().sqrt().clamp(max=1.0) - p.abs() / (1 + q.square()),
    "comparison": lambda p, q: torch.where(p > q, p, q),
    "norms": lambda p, q: torch.stack([p.norm(), torch.linalg.vector_norm(q, 1.0), p.norm(torch.inf)]),
    "sums": lambda p, q: torch.stack([p.sum(), q.mean()]),
    "extremes": lambda p, q: torch.stack([p.max(), p.min(), q.amax(), (p * 100).int().min().float()]),
    "any": lambda p, q: torch.stack([(p > 0).any(), (p > 9).any(), (p < 9).all(), (p > 0).all(), p.isnan().any()]),
    "copies": lambda p, q: p.detach().clone().lerp_(q, 0.25).mul_(3),
    "types": lambda p, q: p.to(torch.bfloat16).float() + torch.ones_like(p) - torch.zeros_like(q),
    "shapes": lambda p, q: p.reshape(-1).view_as(p) + q.flatten().view(p.shape),
    "setting": lambda p, q: _set(p.clone(), q),
    "lists": lambda p, q: torch._foreach_lerp(torch._foreach_clone([p]), [q], 0.25)[0],
}


def _set(p, q):
    p[q > 0.5] = 7.0
    return p


def like_the_whole(rank, world):
    plain = net()
    model = shard(deepcopy(plain))
    for (name, p), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        other = torch.rand(whole.shape, generator=torch.Generator().manual_seed(1))
        q = torch.zeros_like(p).copy_(other)
        assert (p.shape, p.dim(), p.numel(), p.size(0), len(p)) == (
            whole.shape,
            whole.dim(),
            whole.numel(),
            whole.size(0),
            len(whole),
        )
        assert isinstance(p, torch.nn.Parameter)
        with torch.no_grad():
            for what, function in SAME.items():
                ours, theirs = function(p, q), function(whole, other)
                if isinstance(ours, fs.ShardedTensor):
                    assert ours.shape == theirs.shape
                    ours = ours.full_tensor()
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, w=what, n=name: f"{w} {n}: {m}"
                )


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_like_the_whole(ranks, world):
    ranks.run(world, like_the_whole)


REFUSED = {
    "a product of matrices": lambda p: p @ p.new_ones(37, 2),
    "an element": lambda p: p[0],
    "a sum over a dimension": lambda p: p.sum(0),
    "numpy": lambda p: p.numpy(),
    "a number": lambda p: p.sum(0).item(),
    "a transpose": lambda p: p.t(),
    "a plain tensor of its shape": lambda p: p + torch.ones(p.shape),
    "a plain tensor of another": lambda p: p.copy_(torch.ones(3)),
    "one that is divided otherwise": lambda p: p.lerp(p.reshape(-1), 0.5),
    "a norm of order 0": lambda p: torch.linalg.vector_norm(p, 0),
    "another type": lambda p: setattr(p, "data", p.double()),
    "a gradient that is plain": lambda p: setattr(p, "grad", torch.ones(p.shape)),
    "a hook": lambda p: p.register_hook(print),
    "a pickle": pickle.dumps,
    "equality": lambda p: torch.equal(p, p),
    "maxima of a list": lambda p: torch._foreach_max([p]),
    "sums of powers of a list": lambda p: torch._foreach_powsum([p], 2),
}


def refused(rank, world):
    model = shard(net())
    weight = model.blocks[0].widen.weight
    before = weight.full_tensor()
    for function in REFUSED.values():
        with torch.no_grad(), pytest.raises(fs.FlagstoneError, match=r"blocks.0.widen.weight|of order 0"):
            function(weight)
    assert torch.equal(weight.full_tensor(), before)


def test_what_would_take_a_part_for_the_whole_is_refused_by_name(ranks):
    ranks.run(2, refused)


def drawn(rank, world):
    plain = net()
    model = shard(deepcopy(plain))
    for made in (model, plain):
        torch.manual_seed(5)
        for parameter in made.parameters():
            with torch.no_grad():
                parameter.normal_(0, 0.1).mul_(2)
                torch.nn.init.trunc_normal_(parameter, std=0.3)
                if parameter.dim() > 1:
                    torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
                    torch.nn.init.xavier_normal_(parameter)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b)


def test_random_numbers_do_not_depend_on_the_number_of_ranks(ranks):
    ranks.run(3, drawn)
