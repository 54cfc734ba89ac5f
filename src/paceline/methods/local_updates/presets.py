"""Presets of local updates: the defaults of their papers, under the papers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.rounds import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalUpdates):
    """Local SGD: every worker steps by itself, and parameters are averaged every so many steps.

    Stich, "Local SGD converges fast and communicates little" (ICLR 2019); McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data" (AISTATS 2017),
    whose FedAvg it is where all workers take part in each round.

    With `state=average` the optimizer's moments are averaged, too: Local Adam.
    """

    name: ClassVar[str] = "local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages parameters once in `sync_every` steps.",
        source="Stich, Local SGD (ICLR 2019); McMahan et al., FedAvg (AISTATS 2017)",
        use_when="the network is too slow for a gradient in every step",
        waits_for="every worker, in every `sync_every`-th step",
        sends="the parameters, once in `sync_every` steps",
        guarantees="All workers hold equal models after each round: the mean of their models.",
        limits=(
            (
                "With `sync_every=1` it equals bsp for optimizers that are linear in gradients (SGD, with "
                "or without momentum). With Adam it does not."
            ),
            "The loss of accuracy depends on `sync_every`: compare on your own model.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalUpdates):
    """Post-local SGD: means in each step at first, and in every 16th later.

    Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020). Early
    steps change most, and there workers that go apart lose accuracy; later, local steps even
    help to generalize.

    Parameters are averaged also while that is done in each step, with momenta that stay each
    worker's own, as in the authors' code: under SGD that is bsp. Theirs begins to average rarely
    at the first decay of the learning rate (epoch 150 of 300): give `sync_each_step_until` as that step.
    """

    name: ClassVar[str] = "post-local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages parameters in every step at first, and seldom later.",
        source="Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD (ICLR 2020)",
        use_when="local SGD loses accuracy in the first part of training",
        waits_for=(
            "every worker, in each of the first `sync_each_step_until` steps, then in every "
            "`sync_every`-th"
        ),
        sends="the parameters, as often",
        guarantees="All workers hold equal models after each round.",
        limits=(
            (
                "The authors begin local steps at the first decay of the learning rate: set "
                "`sync_each_step_until` to that step."
            ),
        ),
    )
    in_the_long_run: ClassVar[Mapping[str, str]] = {"sync_each_step_until": "0"}

    sync_every: int = 16
    sync_each_step_until: int = 1000

    @property
    def learns_for(self) -> int:
        """Steps until it averages as seldom as it will."""
        return self.sync_each_step_until


@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(LocalUpdates):
    """Hierarchical local SGD: means inside each rack often, and of all workers rarely.

    Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020),
    section 5; Castiglia, Das and Patterson, "Multi-level local SGD" (ICLR 2021). It fits racks
    with thin uplinks: most means never leave a rack.

    With `group_every=1` and SGD a rack is one worker of local SGD with bsp inside. Groups are
    `rack`, `host`, or a number of workers (the last group may have fewer). Who has trained on
    more samples since the last mean of a kind weighs more in it.
    """

    name: ClassVar[str] = "hierarchical-local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages parameters in each rack often, and over all workers seldom.",
        source="Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD (ICLR 2020)",
        use_when="racks share thin uplinks",
        waits_for=(
            "the workers of its own group in every `group_every`-th step, all in every "
            "`sync_every`-th"
        ),
        sends="the parameters, as often",
        guarantees=(
            "Workers of a group hold equal models after its averages. All workers do after those of "
            "all."
        ),
        limits=(
            (
                "`group=rack` and `group=host` need a cluster file. A number of workers (`group=8`) needs "
                "none."
            ),
            "Averages inside a group are not compressed.",
        ),
    )

    sync_every: int = 16
    group: str = "rack"
    group_every: int = 1


@dataclass(frozen=True, kw_only=True)
class SlowMo(LocalUpdates):
    """SlowMo: local SGD with a slow outer momentum.

    Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed SGD
    with slow momentum" (ICLR 2020), algorithm 1 over local SGD. At a constant learning rate it is
    heavy ball on what each round has moved, and so is BMUF (Chen and Huo, ICASSP 2016), whose
    momentum is 1-1/n.

        D = mean(x - x_i);   u <- b*u + D/lr;   x <- x - eta*lr*u

    The outer momentum u is in units of the learning rate lr of the moment (of each parameter
    group), so it fades as lr falls, which is often what one wants: `rescale=false` is without.
    Where lr is 0 there is no such unit, and the plain mean is taken. Defaults are those of the
    authors' implementation in fairscale: 48 steps, b = 0.5, eta = 1 (their alpha).
    """

    name: ClassVar[str] = "slowmo"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Adds a slow outer momentum to local SGD.",
        source="Wang, Tantia, Ballas and Rabbat, SlowMo (ICLR 2020)",
        use_when="you want longer rounds than `local-sgd` allows, with SGD as the inner optimizer",
        waits_for="every worker, in every `sync_every`-th step",
        sends="the change of the parameters, once in `sync_every` steps",
        guarantees="All workers hold equal models after each round.",
        limits=(
            (
                "The outer momentum is kept in units of the present learning rate, so it decays with it "
                "(`rescale=true`)."
            ),
            "BMUF is `outer_momentum=1-1/n,rescale=false`.",
            (
                "A checkpoint that is loaded with another number of workers drops the changes since the "
                "last average."
            ),
        ),
    )

    sync_every: int = 48
    outer_momentum: float = 0.5
    rescale: bool = True


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalUpdates):
    """DiLoCo: hundreds of local steps, and then an outer step with Nesterov momentum.

    Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023),
    algorithm 1: inner AdamW, whose state stays on each worker, H = 500, outer SGD with learning
    rate 0.7 and Nesterov momentum 0.9.

        D = mean(x - x_i);   u <- b*u + D;   x <- x - eta*(D + b*u)

    These are the paper's defaults, and no safe ones: the first round moves the model 1.33 times
    as far as the mean of the workers, and a lasting direction 7 times, eta/(1-b). For rounds
    of less than 50 steps choose 1 to 3; Google's MaxText ships 0.3 and runs 0.1.
    Evaluations see the outer parameters x, not what the workers make of them.
    """

    name: ClassVar[str] = "diloco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Takes hundreds of local steps, then an outer step with Nesterov momentum.",
        source="Douillard et al., DiLoCo (2023)",
        use_when="links are so slow that workers can communicate only once in hundreds of steps",
        waits_for="every worker, in every `sync_every`-th step",
        sends="the change of the parameters, once in `sync_every` steps",
        guarantees="All workers hold equal models after each round.",
        limits=(
            (
                "The defaults move the model 7 times as far as plain averaging where workers go on in one "
                "direction. For rounds of less than 50 steps lower `outer_learning_rate` until that "
                "factor is 1 to 3."
            ),
            "The paper's inner optimizer is AdamW.",
            (
                "A checkpoint that is loaded with another number of workers drops the changes since the "
                "last average."
            ),
        ),
    )

    sync_every: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(LocalUpdates):
    """Streaming DiLoCo: the model travels in fragments, by turns, while training goes on.

    Douillard et al., "Streaming DiLoCo with overlapping communication" (2025). Each fragment has
    its round of H steps, and they follow each other at distances of H/P. A mean is used tau steps
    after it was sent, so that nobody waits for it. Then a worker keeps a part alpha of its own:

        x_i <- alpha*x_i + (1 - alpha)*x

    The peak of what a link carries is the largest fragment, so they are of about one size.
    What a worker has done in the `delay` steps before a mean comes is lost but for the part that
    it keeps (`keep_local`); that part counts in the next round's change once more. Defaults: tau 5,
    alpha 0.5, H 100, outer learning rate 0.4 and momentum 0.9, as in the paper; its 4-bit codes
    are `compression=`'s business.

    Differs from the paper in that fragments are made of parameters by their sizes, and not of
    every so many-th layer.
    """

    name: ClassVar[str] = "streaming-diloco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Sends the model of DiLoCo in fragments, in turn, while training goes on.",
        source="Douillard et al., Streaming DiLoCo with overlapping communication (2025)",
        use_when="links are too slow to wait for an average of the whole model",
        waits_for="no worker, unless an average takes longer than `delay` steps",
        sends="the change of one fragment, once in `sync_every`/`fragments` steps",
        guarantees="The outer parameters of a fragment are equal on all workers after its turn.",
        limits=(
            (
                "A worker's own steps in the `delay` steps before an average arrives are lost, except for "
                "the share `keep_local`."
            ),
            "Fragments are cut by size. The paper takes every so many-th layer.",
            (
                "A checkpoint that is loaded with another number of workers drops the changes since the "
                "last average."
            ),
        ),
    )

    sync_every: int = 100
    outer_learning_rate: float = 0.4
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 4
    delay: int = 5
    keep_local: float = 0.5


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalUpdates):
    """SparseLoCo: what 30 local steps have moved, as few of its largest elements in 2 bits each.

    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo" (arXiv 2508.15706, 2025).
    Each worker keeps what it has not sent yet, and forgets a part of it in each round; that takes
    the place of an outer momentum, so there is none:

        e_i <- beta*e_i + (x - x_i);   c_i = Q(TopK(e_i))
        e_i <- e_i - c_i;   x <- x - eta*mean(c_i)

    TopK takes the k largest elements of each chunk of a tensor, and Q rounds them to 2 bits.

    It is `diloco` with other options. Unless another compression is named it has top-k in chunks of 4,096
    elements with k = 64, and error feedback with beta = 0.95, each a key of `compression`.
    `compression=none` sends the whole change. The paper goes from 1 to 3 % of the elements and from
    15 steps a round to 250; these values, H = 30 and eta = 1 are those of the family's published training code.

    Ours: tensors of one dimension, and small ones, are sent as they are. The mean counts a worker
    that has not sent an element as one that has sent a zero. Workers weigh what they have trained on.
    What is left of the last round goes without a code, and what workers keep back then is dropped.
    """

    name: ClassVar[str] = "sparse-loco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Sends the largest parameter changes of a round, in 2 bits each.",
        source="Sarfi et al., SparseLoCo (arXiv 2508.15706, 2025)",
        use_when="a round's whole change is too large for the links",
        waits_for="every worker, in every `sync_every`-th step",
        sends="64 in 4,096 elements of the change of the parameters, once in `sync_every` steps",
        guarantees="All workers hold equal models after each round.",
        limits=(
            "Another `compression=`, or `none`, replaces its own.",
            "Sparse changes are gathered: each worker receives those of all others.",
            (
                "A checkpoint that is loaded with another number of workers drops the changes since the "
                "last average."
            ),
        ),
    )
    default_compression: ClassVar[str] = (
        "top-k:chunk=4096,density=0.015625,bits=2,decay=0.95"
    )

    sync_every: int = 30
