"""One worker's training: PyTorch's hooks become a method's hooks.

- `kernel`: `Training`, which the wrapped optimizer calls; start here.
- `present`: which training that is now, where methods change.
- `parts`: what it is made of, made and joined.
- `passes`: hooks into the user's model: which passes are a step's.
- `steps`: what the method is told in a step, and what training itself sends.
- `arrival`: gradients, from their hooks into buckets, and on in plan order.
- `presence`: who trains, as this worker knows it; `agreement`: how workers in groups
  learn it.
- `roll_call`: how workers learn that, beside the means that they form.
- `means`: what a method's means are made of: what is sent, how it is formed, who counts.
- `coding`: means through a compressor, round by round.
- `run`: the `Run` that a method sees, one kind for each kind of method.
- `own`: what a checkpoint keeps of one worker alone.
- `uses`: when a module is about to use parameters.
- `faults`: why a training cannot go on.
- `method_hooks`: calls a method's hooks, and refuses those that there are not.
- `observers`: those who only watch: compute time, the planner, and others.
"""

from paceline.training.kernel import Training
from paceline.training.parts import MakeRemote
from paceline.training.present import Changes, Present

__all__ = ["Changes", "MakeRemote", "Present", "Training"]
