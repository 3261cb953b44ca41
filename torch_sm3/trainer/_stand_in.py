"""Stand-in for LayerRun."""
import torch
from torch_sm3.reversible._replay import Inventory, Replay
from torch_sm3.reversible._steps import Half, Permute, Side
from torch_sm3.trainer._gradients import vjp, add
from torch_sm3 import _ops


class LayerRun:
    def __init__(self, block, exact="none", grid_bits=16):
        self.block = block
        self.exact = exact
        self.aux = ()

    def forward(self, stack, side):
        stack = list(stack)
        self.side = Side(side)
        self.records = []
        for step in self.block._steps():
            if isinstance(step, Permute):
                step.move(None, stack, False)
                self.records.append(None)
                continue
            assert isinstance(step, Half)
            replay = Replay("block", step.layers, Inventory(step.layers), step.learned)
            kw = self.side.build(step.side_names(self.side), self.side.tensors)
            ctx = [stack[i] for i in step.reads]
            with torch.no_grad():
                f = replay.first(lambda: step.run(ctx, kw), [c for c in ctx if isinstance(c, torch.Tensor)], {})
                self.records.append((replay, stack[step.acc] if self.exact != "none" else None))
                stack[step.acc] = _ops.reversible_add(stack[step.acc], f)
        return stack

    def reverse_and_grad(self, stack, grads, needs_grad=None, aux_grads=None):
        stack, grads = list(stack), list(grads)
        pg, sg = {}, {}
        for step, rec in zip(reversed(self.block._steps()), reversed(self.records)):
            if rec is None:
                step.move(None, stack, True)
                n = len(step._indices)
                g = [None] * step._n_in
                for o, i in enumerate(step._indices):
                    g[i] = add(g[i], grads[o])
                grads[:n] = g
                continue
            replay, kept = rec
            leaves = [c.detach().requires_grad_(c.is_floating_point()) if isinstance(c, torch.Tensor) else c for c in (stack[i] for i in step.reads)]
            sides = [t.detach().requires_grad_(t.is_floating_point()) for t in self.side.tensors]
            kw = self.side.build(step.side_names(self.side), sides)
            with replay.again(), torch.enable_grad():
                f = step.run(leaves, kw)
            stack[step.acc] = kept if kept is not None else _ops.reversible_sub(stack[step.acc], f.detach())
            inputs = [t for t in leaves + sides if isinstance(t, torch.Tensor) and t.requires_grad] + replay.owned
            got = dict(zip(map(id, inputs), vjp([f], [grads[step.acc]], inputs)))
            for i, leaf in zip(step.reads, leaves):
                grads[i] = add(grads[i], got.get(id(leaf)))
            for s, t in zip(sides, self.side.tensors):
                g = add(sg.get(id(t)), got.get(id(s)))
                if g is not None:
                    sg[id(t)] = g
            for p in replay.owned:
                g = add(pg.get(p), got[id(p)])
                if g is not None:
                    pg[p] = g
        return stack, grads, sg, pg
