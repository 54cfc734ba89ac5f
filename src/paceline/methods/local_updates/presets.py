"""Presets of local-update methods: each has its paper's name and defaults.

- `LocalSGD`, `PostLocalSGD`, `HierarchicalLocalSGD`: plain averaging of the parameters.
- `SlowMo`, `DiLoCo`: an outer optimizer with momentum.
- `StreamingDiLoCo`: fragments of the model, and averages that overlap training.
- `SparseLoCo`: sparse, quantized parameter changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.rounds import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalUpdates):
    """Local SGD: each worker trains alone, and all average their parameters every `sync_every` steps.

    Stich, "Local SGD converges fast and communicates little" (ICLR 2019); McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data" (AISTATS 2017). It
    equals their FedAvg with all workers active in each round.

    With `state=average`, workers also average the optimizer's moments: this is Local Adam.
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
    """Post-local SGD: workers average in every step at first, and in every 16th step later.

    Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020). Early
    steps change the model most, so local steps lose accuracy there. Later, local steps even improve
    generalization.

    In the first phase, too, workers average parameters, not gradients, and each keeps its own
    momentum, as in the authors' code. With SGD this equals bsp. The authors end the first phase at
    the first decay of the learning rate (epoch 150 of 300): set `sync_each_step_until` to that step.
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
        sends="the parameters, in each step in which a worker waits",
        guarantees="All workers hold equal models after each round.",
        limits=(
            (
                "The authors begin local steps at the first decay of the learning rate: set "
                "`sync_each_step_until` to that step."
            ),
        ),
    )
    steady_state_keys: ClassVar[Mapping[str, str]] = {"sync_each_step_until": "0"}

    sync_every: int = 16
    sync_each_step_until: int = 1000

    @property
    def learns_for(self) -> int:
        """Steps of the first phase, after which workers average every `sync_every` steps."""
        return self.sync_each_step_until


@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(LocalUpdates):
    """Hierarchical local SGD: workers average often inside their rack, and seldom over all racks.

    Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020),
    section 5; Castiglia, Das and Patterson, "Multi-level local SGD" (ICLR 2021). It suits racks
    with thin uplinks, since most averages stay inside a rack.

    With `group_every=1` and SGD, each rack acts as one worker of local SGD that runs bsp inside.
    Groups are `rack`, `host`, or a number of workers (the last group may have fewer). A worker that
    has trained on more samples since the last average of the same kind has a larger weight.
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
        sends="the parameters, in each step in which a worker waits",
        guarantees=(
            "Workers of a group hold equal models after each average of the group, and all workers "
            "after each average of all."
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
    """SlowMo: adds a slow outer momentum to local SGD.

    Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed SGD
    with slow momentum" (ICLR 2020), algorithm 1 over local SGD. At a constant learning rate it is
    heavy-ball momentum on the change of each round. So is BMUF (Chen and Huo, ICASSP 2016), whose
    momentum is 1-1/n.

        D = mean(x - x_i);   u <- b*u + D/lr;   x <- x - eta*lr*u

    The outer momentum u is in units of the current learning rate lr of each parameter group, so its
    effect decays with lr. `rescale=false` turns this off. Parameters whose lr is 0 take the plain
    average. Defaults are those of the authors' implementation in fairscale: 48 steps, b = 0.5,
    eta = 1 (their alpha).
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
                "The outer momentum is in units of the present learning rate, and decays with that "
                "rate (`rescale=true`)."
            ),
            "BMUF is `outer_momentum=1-1/n,rescale=false`.",
            (
                "If another number of workers loads a checkpoint, the changes since the last average "
                "are lost."
            ),
        ),
    )

    sync_every: int = 48
    outer_momentum: float = 0.5
    rescale: bool = True


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalUpdates):
    """DiLoCo: workers take hundreds of local steps, then an outer step with Nesterov momentum.

    Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023),
    algorithm 1: inner AdamW, whose state stays on each worker, H = 500, outer SGD with learning
    rate 0.7 and Nesterov momentum 0.9.

        D = mean(x - x_i);   u <- b*u + D;   x <- x - eta*(D + b*u)

    These are the paper's defaults, and they are not safe for every model. The first round moves the
    model 1.33 times as far as plain averaging. Rounds that all go in one direction move it 7 times
    as far, eta/(1-b). For rounds of less than 50 steps, choose options with a factor of 1 to 3.
    Google's MaxText has an outer learning rate of 0.3 by default, and 0.1 in its runs. Evaluations
    use the outer parameters x, not the workers' own.
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
                "If all rounds move in one direction, the defaults move the model 7 times as far as "
                "plain averaging. For rounds of less than 50 steps lower `outer_learning_rate` until "
                "that factor is 1 to 3."
            ),
            "The paper's inner optimizer is AdamW.",
            (
                "If another number of workers loads a checkpoint, the changes since the last average "
                "are lost."
            ),
        ),
    )

    sync_every: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(LocalUpdates):
    """Streaming DiLoCo: workers send the model in fragments, in turn, while training continues.

    Douillard et al., "Streaming DiLoCo with overlapping communication" (2025). Each fragment has
    rounds of H steps, and a fragment is sent every H/P steps. Its average is applied tau steps after
    it was sent, so no worker waits for it. A worker then keeps a share alpha of its own parameters:

        x_i <- alpha*x_i + (1 - alpha)*x

    The largest fragment sets the peak load of a link, so fragments are about equal in size. A
    worker's progress during the `delay` steps is lost except for the share that it keeps
    (`keep_local`). The next round's change counts that share once more. Defaults are the paper's:
    tau = 5, alpha = 0.5, H = 100, outer learning rate 0.4 and momentum 0.9. For its 4-bit messages,
    set `compression=`.

    Unlike the paper, which strides over layers, this implementation forms fragments by the sizes of
    parameters.
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
                "When an average arrives, a worker loses its own last `delay` steps, except for the "
                "share `keep_local`."
            ),
            "Fragments have about equal bytes. In the paper a fragment takes layers at a fixed distance.",
            (
                "If another number of workers loads a checkpoint, the changes since the last average "
                "are lost."
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
    """SparseLoCo: workers send the largest elements of a round's change, in 2 bits each.

    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo" (arXiv 2508.15706, 2025).
    Each worker keeps the unsent part of its changes as error feedback, and decays it in each round.
    This replaces the outer momentum:

        e_i <- beta*e_i + (x - x_i);   c_i = Q(TopK(e_i))
        e_i <- e_i - c_i;   x <- x - eta*mean(c_i)

    TopK takes the k largest elements of each chunk of a tensor, and Q rounds them to 2 bits.

    It is `diloco` with other options. The default compression is top-k in chunks of 4,096 elements
    with k = 64, and error feedback with beta = 0.95; each is a key of `compression`.
    `compression=none` sends the whole change. The paper tries 1 to 3 % of the elements, and 15 to
    250 steps a round. These values, H = 30 and eta = 1 come from the family's published training
    code.

    Choices of this implementation:

    - Tensors of one dimension, and small tensors, are not compressed.
    - An element that a worker has not sent counts as zero in the average.
    - A worker's weight is the number of samples that it has trained on.
    - The rest of the last round is sent uncompressed, and the error feedback is then dropped.
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
            "Another `compression=`, also `none`, replaces the default compression.",
            "Sparse changes are gathered: each worker receives those of all others.",
            (
                "If another number of workers loads a checkpoint, the changes since the last average "
                "are lost."
            ),
        ),
    )
    default_compression: ClassVar[str] = (
        "top-k:chunk=4096,density=0.015625,bits=2,decay=0.95"
    )

    sync_every: int = 30
