"""Cases on a GPU: those of `cases` that can be moved, and the GPU's own.

Run by torchrun, every case on real processes, a line each:

torchrun --nproc-per-node 2 -m tests.core.cuda_cases gloo
"""

import contextlib
import copy
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn

import paceline
from tests.core import cases
from tests.core.cases import check_backward, inputs, wrap

DEVICE = "cuda"
MAKERS = (
    "inputs",
    "network",
    "normalized_model",
    "Checkpointed",
    "UsedTwice",
    "MixedTypes",
    "Complex",
    "Branches",
)
"""What makes the models and inputs of the cases that can be moved."""
MOVED = (
    "non_reentrant_checkpoint",
    "reentrant_checkpoint_inside",
    "reentrant_checkpoint_first_is_refused",
    "gradient_twice_in_one_pass_is_refused",
    "accumulation_by_ddps_attribute",
    "mixed_types",
    "complex_parameters",
    "unused_parameters_change_from_step_to_step",
    "a_loss_that_reaches_no_parameter_on_one_rank",
    "non_finite_gradients_are_named_if_asked",
    "buffers_follow_the_setting",
    "uneven_means_are_over_those_who_train",
    "blocks_compiled_one_by_one_overlap",
    "function_transforms_are_refused",
    "closures_and_hooks_of_the_optimizer",
    "copies_of_the_model_are_free",
    "a_batch_more_than_the_sampler_has_is_refused",
)


@contextlib.contextmanager
def moved(device=DEVICE):
    """Within it the models and inputs of `cases` are made on *device*."""
    before = {name: getattr(cases, name) for name in MAKERS}

    def moving(make):
        return lambda *arguments, **keys: make(*arguments, **keys).to(device)

    for name, make in before.items():
        setattr(cases, name, moving(make))
    try:
        yield
    finally:
        for name, make in before.items():
            setattr(cases, name, make)


# ---- the GPU's own ----


def deep_model(device=DEVICE):
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


def loss_of(model, rank, step=0):
    device = next(model.parameters()).device
    return model(inputs(rank, step).to(device)).square().mean()


def occupy():
    """Queue kernels on the current stream that take a tenth of a second or more;
    returns an event that is over when they are."""
    x = torch.full((4096, 4096), 1e-3, device=DEVICE)
    for _ in range(60):
        x = x @ x
    over = torch.cuda.Event()
    over.record()
    return over


def check_steps_on_a_busy_gpu(model, backward, **options):
    """Four steps with inputs of their own, so that whatever reads a gradient too early
    finds the one of the step before; ``backward(loss)`` also keeps the GPU busy."""
    optimizer = wrap(model, **options)
    for step in range(4):
        expected = cases.mean_gradients(model, lambda m, r, s=step: loss_of(m, r, s))
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss = loss_of(model, paceline.rank(), step)
        torch.cuda.synchronize()
        backward(loss)
        # Read at once, on this stream, without waiting for the device.
        seen = {name: p.grad.clone() for name, p in model.named_parameters()}
        if step == 0:  # later ones have momentum
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            optimizer.step()
            for name, gradient in expected.items():
                error = (before[name] - 0.5 * gradient - model.state_dict()[name]).abs()
                assert error.max() <= 1e-6, f"{name} was moved by another gradient"
        else:
            optimizer.step()
        for name, gradient in expected.items():
            error = (seen[name] - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max(), f"{name} is off by {error}"
    optimizer.finish()


def backward_behind_long_kernels(loss):
    over = occupy()
    assert not over.query(), "the GPU was not kept busy: the test shows nothing"
    loss.backward()


def gradients_behind_long_kernels():
    for rule in ("wfbp", "single"):
        check_steps_on_a_busy_gpu(
            deep_model(), backward_behind_long_kernels, buckets=rule
        )


def gradients_behind_long_kernels_on_another_stream():
    """The whole training on a stream that is not the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_steps_on_a_busy_gpu(deep_model(), backward_behind_long_kernels)
    torch.cuda.current_stream().wait_stream(stream)


class SlowBackward(torch.autograd.Function):
    """The identity; its backward pass keeps the stream busy first."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        occupy()
        return gradient.clone()


class Slow(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(SlowBackward.apply(x) if x.requires_grad else x)


def long_kernels_within_backward():
    """Later layers' gradients are averaged while earlier ones' are still queued."""
    model = deep_model()
    model[2] = Slow(model[2])
    check_steps_on_a_busy_gpu(model, lambda loss: loss.backward())


class Forked(nn.Module):
    """Two paths, one on a stream of its own, where its backward pass begins slowly."""

    def __init__(self):
        super().__init__()
        self.main, self.branch = deep_model()[:2]
        self.stream = torch.cuda.Stream()

    def __deepcopy__(self, memo):
        other = Forked()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x):
        y = self.main(x)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            z = SlowBackward.apply(self.branch(x))  # last, so first in backward
        here.wait_stream(self.stream)
        return y + z


def a_branch_on_a_stream_of_its_own():
    """One bucket with gradients of two streams is sent when both have filled it."""
    check_steps_on_a_busy_gpu(Forked(), lambda loss: loss.backward(), buckets="single")


def a_mean_over_both_kinds_of_memory():
    """Parameters on the CPU beside others on the GPU: buckets are by device."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.near, self.far = nn.Linear(6, 6), nn.Linear(6, 2).to(DEVICE)

        def forward(self, x):
            return self.far(torch.tanh(self.near(x)).to(DEVICE))

    for rule in ("wfbp", "ddp"):
        check_backward(
            Split(), lambda m, r: m(inputs(r)).square().mean(), 1e-5, buckets=rule
        )


def autocast_on_the_gpu():
    def loss(model, rank):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return loss_of(model, rank).float()

    check_backward(deep_model(), loss, tolerance=2e-2)


def scaler_skips_on_all_ranks_together():
    model = deep_model()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    for overflow in (True, False):
        optimizer.zero_grad()
        loss = loss_of(model, paceline.rank())
        if overflow and paceline.rank() == paceline.world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(v, before[k]) for k, v in model.state_dict().items()]
        assert any(changed) != overflow
    assert scaler.get_scale() == 4.0
    optimizer.finish()


def random_numbers_on_the_gpu_are_each_workers_own():
    """What other workers draw does not matter: equally seeded, all draw the same."""
    torch.manual_seed(11)
    drawn = []
    for _ in range(3):
        drawn.append(torch.rand(4, device=DEVICE))
        total = drawn[-1].clone()  # others' turns come while this one waits
        dist.all_reduce(total)
        assert torch.allclose(total, paceline.world_size() * drawn[-1])
    alone = torch.Generator(DEVICE).manual_seed(11)
    for numbers in drawn:
        assert torch.equal(numbers, torch.rand(4, device=DEVICE, generator=alone))


def uneven_data_with_buffers():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = model.to(DEVICE)
    optimizer = wrap(model)
    with optimizer.join():
        for step in range(2 + paceline.rank()):
            optimizer.zero_grad()
            loss_of(model, paceline.rank(), step).backward()
            optimizer.step()
    flat = torch.cat([t.float().reshape(-1) for t in model.state_dict().values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat)


OWN = {
    case.__name__: case
    for case in (
        gradients_behind_long_kernels,
        gradients_behind_long_kernels_on_another_stream,
        long_kernels_within_backward,
        a_branch_on_a_stream_of_its_own,
        a_mean_over_both_kinds_of_memory,
        autocast_on_the_gpu,
        scaler_skips_on_all_ranks_together,
        random_numbers_on_the_gpu_are_each_workers_own,
        uneven_data_with_buffers,
    )
}

CASES = {name: cases.CASES[name] for name in MOVED} | {
    f"cuda_{name}": case for name, case in OWN.items()
}

NEED_CPU_TENSORS = {a_mean_over_both_kinds_of_memory}
"""NCCL alone moves no tensor that is on the CPU."""


def main():
    """``BACKEND``: what torch.distributed is initialized with, or ``default``: what
    paceline chooses."""
    backend = sys.argv[1]
    torch.cuda.set_device(0)
    if backend != "default":
        dist.init_process_group(backend)
    paceline.init()
    with moved():
        for name, case in CASES.items():
            if backend == "nccl" and case in NEED_CPU_TENSORS:
                continue
            try:
                case()
                sys.stdout.write(f"rank {paceline.rank()} {name}: ok\n")
            except Exception:
                sys.stdout.write(f"rank {paceline.rank()} {name}: FAILED\n")
                traceback.print_exc()
                sys.exit(1)  # the ranks may be out of step


if __name__ == "__main__":
    main()
