"""What DDP's users expect, case by case; each runs on all workers of any runtime.

Inputs follow from the rank, so every worker can compute alone what the mean over all of
them must be, and compare.
"""

import copy
import os
import pickle
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import GradientError, UsageError
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from tests.core.test_halved_means import halves_train_as_the_whole
from tests.support.training import inputs, network


def wrap(model, **options):
    options.setdefault("buckets", "wfbp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return paceline.distribute(model, optimizer, **options)


def mean_gradients(model, loss_of_rank):
    """Gradients of the mean over ranks of ``loss_of_rank(model, rank)``, by one process."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    n = paceline.world_size()
    for rank in range(n):
        loss = loss_of_rank(alone, rank)
        if loss is not None:
            (loss / n).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def assert_gradients(model, expected, tolerance=1e-6):
    for name, parameter in model.named_parameters():
        want = expected[name]
        if want is None:
            assert parameter.grad is None, name
            continue
        error = (parameter.grad - want).abs().max()
        assert error <= tolerance * want.abs().max(), f"{name} is off by {error}"


def check_backward(model, loss_of_rank, tolerance=1e-6, **options):
    """Two steps, the second with settled buckets, use the mean gradient."""
    optimizer = wrap(model, **options)
    for _ in range(2):
        expected = mean_gradients(model, loss_of_rank)
        optimizer.zero_grad()
        loss = loss_of_rank(model, paceline.rank())
        if loss is not None:
            loss.backward()
            assert_gradients(model, expected, tolerance)
        optimizer.step()
        assert_gradients(model, expected, tolerance)
    optimizer.finish()


class Checkpointed(nn.Module):
    def __init__(self, reentrant, last):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 2) if last else None
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return x if self.last is None else self.last(x)


def non_reentrant_checkpoint():
    for last in (True, False):
        model = Checkpointed(reentrant=False, last=last)
        check_backward(model, lambda m, r: m(inputs(r)).square().mean())


def the_whole_model_checkpointed_twice():
    """Its forward hook fires again inside backward, where no step begins or has failed."""

    def loss(model, rank):
        x = checkpoint(model, inputs(rank, 1), use_reentrant=False)
        y = checkpoint(model, inputs(rank, 2), use_reentrant=False)
        return x.square().mean() + y.mean()

    check_backward(network(), loss)


def reentrant_checkpoint_inside():
    model = Checkpointed(reentrant=True, last=True)
    check_backward(model, lambda m, r: m(inputs(r)).square().mean())


def reentrant_checkpoint_first_is_refused():
    model = Checkpointed(reentrant=True, last=False)
    optimizer = wrap(model)
    with pytest.raises(GradientError, match=r"block.*use_reentrant=False"):
        model(inputs(paceline.rank())).square().mean().backward()
    optimizer.finish()


class UsedTwice(nn.Module):
    """One block in two reentrant checkpoints: its gradient comes twice in one pass."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = x.requires_grad_()
        x = checkpoint(self.block, x, use_reentrant=True)
        x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


def gradient_twice_in_one_pass_is_refused():
    model = UsedTwice()
    optimizer = wrap(model)
    with pytest.raises(GradientError, match="computed twice"):
        model(inputs(paceline.rank())).square().mean().backward()
    optimizer.finish()


def accumulation_by_ddps_attribute():
    """As nanoGPT has it, which sets it on what DDP returned: here that is the model."""
    model = network()
    both = lambda m, r: m(inputs(r, 1)).square().mean() + m(inputs(r, 2)).mean()  # noqa: E731
    expected = mean_gradients(model, both)
    passes = []

    class NotedWorker(BSPWorker):
        def bucket_ready(self, bucket):
            passes.append(last)
            super().bucket_ready(bucket)

    @dataclass(frozen=True, kw_only=True)
    class Noted(BSP):
        """Notes in which pass each bucket is sent."""

        name: ClassVar[str] = "noted"

        def start(self, run):
            return NotedWorker(run, self)

    last = False
    optimizer = wrap(model, method=Noted())
    for _ in range(2):
        optimizer.zero_grad()
        for last in (False, True):
            model.require_backward_grad_sync = last
            y = model(inputs(paceline.rank(), 1 + last))
            (y.mean() if last else y.square().mean()).backward()
        assert_gradients(model, expected)
    assert passes
    assert all(passes)
    optimizer.finish()


class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.single = nn.Linear(6, 4)
        self.exact = nn.Linear(4, 4, dtype=torch.float64)
        self.brief = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.end = nn.Linear(4, 1)

    def forward(self, x):
        x = self.exact(self.single(x).double())
        return self.end(self.brief(x.bfloat16()).float())


def mixed_types():
    # bfloat16 keeps 8 bits: a mean of 3 values is rounded five times, by half of the last one
    model = MixedTypes()
    for rule in ("wfbp", "ddp"):
        check_backward(
            copy.deepcopy(model),
            lambda m, r: m(inputs(r)).square().mean(),
            tolerance=2e-2,
            buckets=rule,
        )


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.matrix).abs() * self.scale


def complex_parameters():
    check_backward(Complex(), lambda m, r: m(inputs(r)).square().mean())


def sparse_gradients_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = paceline.distribute(
        model, torch.optim.SparseAdam(list(model.parameters()))
    )
    with pytest.raises(GradientError, match=r"'weight' is sparse.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    optimizer.finish()


class Branches(nn.Module):
    """Which branch is used depends on the caller; one is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.common = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](self.common(x))


def unused_parameters_change_from_step_to_step():
    for rule in ("wfbp", "single"):
        model = Branches()
        optimizer = wrap(model, buckets=rule)
        for step in range(6):
            loss_of_rank = lambda m, r, step=step: (  # noqa: E731
                m(inputs(r, step), (r + step) % 3).square().mean()
            )
            expected = mean_gradients(model, loss_of_rank)
            optimizer.zero_grad()
            loss_of_rank(model, paceline.rank()).backward()
            assert_gradients(model, expected)
            optimizer.step()
            assert_gradients(model, expected)
        optimizer.finish()


def a_loss_that_reaches_no_parameter_on_one_rank():
    check_backward(
        network(),
        lambda m, r: None if r == 0 else m(inputs(r)).square().mean(),
    )


def what_the_optimizer_lacks_is_averaged_and_stays():
    model = network()
    expected = mean_gradients(model, lambda m, r: m(inputs(r)).square().mean())
    optimizer = paceline.distribute(
        model, torch.optim.SGD(model[2].parameters(), lr=0.1), buckets="wfbp"
    )
    before = copy.deepcopy(model.state_dict())
    model(inputs(paceline.rank())).square().mean().backward()
    assert_gradients(model, expected)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("0"), name
    optimizer.finish()


def clip_norm_is_torchs_clipping_of_the_mean_wherever_it_is_applied():
    for method in ("bsp", "backup", "ssp:staleness=0", "osp:defer=nothing"):
        model, start = network(), network()
        mean = mean_gradients(start, lambda m, r: 50 * m(inputs(r)).square().mean())
        norm = torch.stack([g.norm() for g in mean.values()]).norm()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method=method, clip_norm=1.0)
        (50 * model(inputs(paceline.rank())).square().mean()).backward()
        optimizer.step()
        optimizer.finish()
        for name, parameter in start.named_parameters():
            expected = parameter.detach() - 0.1 * mean[name] / (norm + 1e-6)
            moved = model.get_parameter(name).detach()
            torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)


def non_finite_gradients_are_named_if_asked():
    model = network()
    optimizer = wrap(model, check_finite=True)
    x = inputs(paceline.rank())
    if paceline.rank() == 0:
        x[0, 0] = float("nan")
    with pytest.raises(GradientError, match=r"'(0|2)\.\w+'.* step 1"):
        model(x).square().mean().backward()
    optimizer.finish()


def normalized_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def buffers_follow_the_setting():
    n = paceline.world_size()
    for setting in ("rank0", "local"):
        model = normalized_model()
        optimizer = wrap(model, buffers=setting)
        # what each rank would hold after one forward of its own
        alone = []
        for rank in range(n):
            own = copy.deepcopy(model)
            own(inputs(rank))
            alone.append(own[1].running_mean.clone())
        model(inputs(paceline.rank())).square().mean().backward()
        own = model[1].running_mean.clone()
        assert torch.allclose(own, alone[paceline.rank()])
        optimizer.step()
        # what was agreed on is what one rank alone evaluates, and the next step begins with
        agreed = model[1].running_mean.clone()
        if paceline.rank() == n - 1:
            model.eval()
            model(inputs(0)).mean()
            with torch.no_grad():
                model(inputs(0))
            model.train()
        seen = [agreed]
        model[1].register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(module.running_mean.clone())
        )
        model(inputs(paceline.rank(), 1)).square().mean().backward()
        wanted = {
            "rank0": alone[0],
            "local": alone[paceline.rank()],
        }[setting]
        assert len(seen) == 2
        for value in seen:
            assert torch.allclose(value, wanted)
        assert int(model[1].num_batches_tracked) == 2
        optimizer.finish()


def uneven_data_with_buffers():
    model = normalized_model()
    optimizer = wrap(model)
    with optimizer.join():
        for step in range(2 + paceline.rank()):
            optimizer.zero_grad()
            model(inputs(paceline.rank(), step)).square().mean().backward()
            optimizer.step()
    flat = torch.cat([t.double().reshape(-1) for t in model.state_dict().values()])
    everyone = torch.empty(paceline.world_size() * flat.numel(), dtype=flat.dtype)
    torch.distributed.all_gather_single(everyone, flat)
    assert (everyone.view(-1, flat.numel()) == flat).all()


class Roundabout(nn.Module):
    """Trains through another method than forward, or through its submodule."""

    def __init__(self):
        super().__init__()
        self.body = normalized_model()

    def forward(self, x):
        return self.body(x)

    def loss(self, x):
        return self.body(x).square().mean()


def uneven_data_without_a_call_of_the_model_itself():
    """Buffers are shared and lengths may differ, as through forward: same parameters."""
    ends = []
    for loss in (
        lambda m, x: m(x).square().mean(),
        lambda m, x: m.loss(x),
        lambda m, x: m.body(x).square().mean(),
    ):
        model = Roundabout()
        optimizer = wrap(model)
        for step in range(2 + paceline.rank()):
            optimizer.zero_grad()
            loss(model, inputs(paceline.rank(), step)).backward()
            optimizer.step()
        optimizer.finish()
        ends.append(model.state_dict())
    for end in ends[1:]:
        for name, value in end.items():
            assert torch.equal(value, ends[0][name]), name


def uneven_means_are_over_those_who_train():
    model = network()
    optimizer = wrap(model)
    n = paceline.world_size()
    for step in range(1, 2 + (paceline.rank() > 0)):
        optimizer.zero_grad()
        still = [r for r in range(n) if step == 1 or r > 0]
        alone = copy.deepcopy(model)
        alone.zero_grad()
        for rank in still:
            (alone(inputs(rank, step)).square().mean() / len(still)).backward()
        model(inputs(paceline.rank(), step)).square().mean().backward()
        assert_gradients(model, {k: p.grad for k, p in alone.named_parameters()})
        optimizer.step()
    optimizer.finish()


@dataclass(frozen=True, kw_only=True)
class WatchesReadiness(BSP):
    """Notes how many gradients were still to come when each bucket was ready."""

    missing: list = field(default_factory=list)

    def start(self, run):
        return ReadinessWorker(run, self)


class ReadinessWorker(BSPWorker):
    def bucket_ready(self, bucket):
        missing = sum(other.missing for other in self.run.buckets)
        self.method.missing.append(missing)
        super().bucket_ready(bucket)


def missing_when_ready(model):
    method = WatchesReadiness()
    optimizer = wrap(model, method=method)
    for _ in range(2):
        method.missing.clear()
        optimizer.zero_grad()
        model(inputs(paceline.rank())).square().mean().backward()
        optimizer.step()
    seen = list(method.missing)
    optimizer.finish()
    return seen


def blocks_compiled_one_by_one_overlap():
    model = network()
    for block in model:
        block.compile(backend="aot_eager")
    assert missing_when_ready(model)[0] > 0  # sent while backward still ran


def a_model_compiled_whole_warns():
    for compile_whole in (
        lambda m: torch.compile(m, backend="aot_eager"),
        lambda m: m.compile(backend="aot_eager") or m,
    ):
        model = network()
        expected = mean_gradients(model, lambda m, r: m(inputs(r)).square().mean())
        compiled = compile_whole(model)
        with pytest.warns(UserWarning, match="Compile its blocks"):
            optimizer = wrap(compiled)
        for last in (False, True):
            compiled.require_backward_grad_sync = last
            compiled(inputs(paceline.rank())).square().mean().backward()
            optimizer.zero_grad(set_to_none=not last)
            assert inspect(optimizer).step_pending == last
        compiled(inputs(paceline.rank())).square().mean().backward()
        assert_gradients(model, expected)
        optimizer.finish()


def function_transforms_are_refused():
    model = network()
    optimizer = wrap(model)
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (inputs(0),)).mean()

    with pytest.raises(UsageError, match=r"torch\.func"):
        torch.func.grad(loss)(parameters)
    optimizer.finish()


def autocast_in_bfloat16():
    def loss(model, rank):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs(rank)).float().square().mean()

    check_backward(network(), loss, tolerance=1e-2)


def closures_and_hooks_of_the_optimizer():
    model = network()
    optimizer = wrap(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = model(inputs(paceline.rank())).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert calls == ["before", "after"]
    optimizer.finish()


def copies_of_the_model_are_free():
    model = network()
    optimizer = wrap(model)
    for make_copy in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        model(inputs(0)).mean().backward()
        average = make_copy(model)
        average(inputs(0)).mean().backward()  # nothing is sent, nobody waits
        with torch.no_grad():
            average[0].weight.lerp_(model[0].weight, 0.1)
        optimizer.step()
    optimizer.finish()


def weighted_by_samples_equals_one_process():
    """Unequal shares, odd samples, a partial last batch, accumulation: the same sequence
    as one process on the union of the workers' batches."""
    n = paceline.world_size()
    x = torch.randn(53, 6, generator=torch.Generator().manual_seed(7))
    y = x.sum(1, keepdim=True)
    for accumulate in (1, 2):
        model = network()
        alone = copy.deepcopy(model)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        sampler = paceline.Sampler(x, 10, shares=[1.0 + r for r in range(n)], seed=5)
        union = [sorted(sampler._counts[b]) for b in range(len(sampler))]
        assert [sum(counts) for counts in union][:5] == [10] * 5
        optimizer = wrap(model, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            order = torch.randperm(
                53, generator=torch.Generator().manual_seed(5 + epoch)
            )
            start = 0
            for number, batch in enumerate(sampler):
                last = number % accumulate == accumulate - 1
                mine = (model(x[batch]) - y[batch]).square().mean()
                if last:
                    mine.backward()
                else:
                    with optimizer.no_sync():
                        mine.backward()
                whole = order[start : start + sum(union[number])]
                start += len(whole)
                (alone(x[whole]) - y[whole]).square().mean().backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    plain.step()
                    plain.zero_grad()
            optimizer.zero_grad()
            plain.zero_grad()
        optimizer.finish()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            error = (ours - theirs).abs().max()
            assert error <= 1e-5 * theirs.abs().max()


def a_sampler_weighs_without_a_call_of_the_model_itself():
    n = paceline.world_size()
    x = torch.randn(53, 6, generator=torch.Generator().manual_seed(7))
    model = Roundabout()
    model.body = network()
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    sampler = paceline.Sampler(x, 10, shares=[1.0 + r for r in range(n)], shuffle=False)
    optimizer = wrap(model, sampler=sampler)
    start = 0
    for number, batch in enumerate(sampler):
        optimizer.zero_grad()
        model.loss(x[batch]).backward()
        optimizer.step()
        stop = start + sum(sampler._counts[number])
        plain.zero_grad()
        alone.loss(x[start:stop]).backward()
        plain.step()
        start = stop
    optimizer.finish()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def a_share_that_changes_within_a_step_needs_a_call_of_the_model():
    model = network()
    sampler = paceline.Sampler(range(25), 10, drop_last=False)
    sampler.weight = lambda batch: (batch + 1) / 10
    optimizer = wrap(model, sampler=sampler)
    list(sampler)
    x = inputs(paceline.rank())
    with optimizer.no_sync():
        model[2](model[1](model[0](x))).mean().backward()
    with pytest.raises(UsageError, match=r"is 0\.2 and .* is 0\.1\."):
        model[2](model[1](model[0](x))).mean().backward()
    optimizer.finish()


def a_batch_more_than_the_sampler_has_is_refused():
    model = network()
    sampler = paceline.Sampler(range(20), 10)
    optimizer = wrap(model, sampler=sampler)
    for _ in sampler:
        model(inputs(paceline.rank())).mean().backward()
        optimizer.step()
    loss = model(inputs(paceline.rank())).mean()  # an evaluation that forgot no_grad
    with pytest.raises(UsageError, match="backward pass 3 of an epoch of 2 batches"):
        loss.backward()
    optimizer.finish()


def one_model_has_one_optimizer():
    model = network()
    optimizer = wrap(model)
    with pytest.raises(UsageError, match="averaged twice"):
        wrap(nn.Sequential(model[0]))
    optimizer.finish()
    wrap(model).finish()


def two_models_side_by_side():
    """As in a GAN: the second model's loss goes through the first."""
    torch.manual_seed(3)
    maker, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    first, second = wrap(judge), wrap(maker)
    rank = paceline.rank()
    for step in range(3):
        first.zero_grad()
        expected = mean_gradients(judge, lambda m, r: m(inputs(r, step)).mean())  # noqa: B023
        judge(inputs(rank, step)).mean().backward()
        assert_gradients(judge, expected)
        first.step()
        second.zero_grad()
        frozen = copy.deepcopy(judge)
        expected = mean_gradients(
            maker,
            lambda m, r: frozen(m(inputs(r, step))).square().mean(),  # noqa: B023
        )
        judge(maker(inputs(rank, step))).square().mean().backward()
        assert_gradients(maker, expected)
        second.step()
    first.finish()
    second.finish()


def buffers_and_two_backwards():
    model = normalized_model()
    optimizer = wrap(model)
    for step in range(2):
        one = model(inputs(paceline.rank(), step)).square().mean()
        two = model(inputs(paceline.rank(), step + 5)).mean()
        one.backward(retain_graph=True)
        one.backward()
        two.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()


def a_parameter_unfrozen_later_is_refused():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model)
    model[0].weight.requires_grad_(True)
    model(inputs(paceline.rank())).mean().backward()
    with pytest.raises(UsageError, match=r"'0\.weight' was frozen"):
        optimizer.step()
    optimizer.finish()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken")


def a_backward_that_raised_can_be_done_again():
    model = network()
    expected = mean_gradients(model, lambda m, r: m(inputs(r)).mean())
    # one bucket, so nothing is sent before the exception
    optimizer = wrap(model, buckets="single")
    hidden = model[1](model[0](inputs(paceline.rank())))
    with pytest.raises(ArithmeticError):
        model[2](Breaks.apply(hidden)).mean().backward()
    optimizer.zero_grad()
    model(inputs(paceline.rank())).mean().backward()
    assert_gradients(model, expected)
    optimizer.finish()


def a_checkpoint_keeps_each_ranks_buffers():
    model = normalized_model()
    runtime = join_runtime()
    runtime.registry.trainings.clear()
    optimizer = wrap(model)
    for step in range(2):
        model(inputs(paceline.rank(), step)).square().mean().backward()
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    folder = os.environ["PACELINE_TEST_FOLDER"] + "/with-buffers/"
    paceline.save(folder)
    paceline.save(folder)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    paceline.load(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    optimizer.finish()
    runtime.registry.trainings.clear()


def groups_and_channels_of_unequal_history():
    """Ranks that belong to different numbers of groups find each other all the same."""
    optimizer = wrap(network())
    comm = inspect(optimizer).comm
    n, rank = comm.size, comm.rank
    for pair in [(0, r) for r in range(1, n)]:
        if rank in pair:
            value = torch.tensor([float(rank)])
            comm.group(pair).all_reduce(value, "sum").wait()
            assert value.item() == sum(pair)
            assert comm.group(pair) is comm.group(pair)
    for name in ("second", "third"):
        value = torch.tensor([float(rank)])
        comm.channel(name).all_reduce(value, "max").wait()
        assert value.item() == n - 1
    output = torch.empty(n)
    comm.channel("second").all_gather(output, torch.tensor([float(rank)])).wait()
    assert output.tolist() == list(range(n))
    part = torch.empty(1)
    comm.reduce_scatter(part, torch.arange(float(n)) * (rank + 1)).wait()
    assert abs(part.item() - rank * (n + 1) / 2) < 1e-6
    optimizer.finish()


CASES = {
    case.__name__: case
    for case in (
        halves_train_as_the_whole,
        non_reentrant_checkpoint,
        the_whole_model_checkpointed_twice,
        reentrant_checkpoint_inside,
        reentrant_checkpoint_first_is_refused,
        gradient_twice_in_one_pass_is_refused,
        accumulation_by_ddps_attribute,
        mixed_types,
        complex_parameters,
        sparse_gradients_are_refused,
        unused_parameters_change_from_step_to_step,
        a_loss_that_reaches_no_parameter_on_one_rank,
        what_the_optimizer_lacks_is_averaged_and_stays,
        clip_norm_is_torchs_clipping_of_the_mean_wherever_it_is_applied,
        non_finite_gradients_are_named_if_asked,
        buffers_follow_the_setting,
        uneven_data_with_buffers,
        uneven_data_without_a_call_of_the_model_itself,
        uneven_means_are_over_those_who_train,
        blocks_compiled_one_by_one_overlap,
        a_model_compiled_whole_warns,
        function_transforms_are_refused,
        autocast_in_bfloat16,
        closures_and_hooks_of_the_optimizer,
        copies_of_the_model_are_free,
        groups_and_channels_of_unequal_history,
        weighted_by_samples_equals_one_process,
        a_sampler_weighs_without_a_call_of_the_model_itself,
        a_share_that_changes_within_a_step_needs_a_call_of_the_model,
        a_batch_more_than_the_sampler_has_is_refused,
        one_model_has_one_optimizer,
        two_models_side_by_side,
        buffers_and_two_backwards,
        a_parameter_unfrozen_later_is_refused,
        a_backward_that_raised_can_be_done_again,
        a_checkpoint_keeps_each_ranks_buffers,
    )
}

PER_PROCESS = {a_model_compiled_whole_warns}
"""Warnings are caught per process: it cannot share one with other workers."""
