"""One worker's training: PyTorch's hooks become a method's hooks.

- `kernel`: `Training`, which joins all that is below; start here.
- `arrival`: gradients, from their hooks into buckets, and on in plan order.
- `presence`: who trains, as this worker knows it.
- `roll_call`: how workers learn that, beside the means that they form.
- `means`: what a method's means are made of: what is sent, how it is formed, who counts.
- `coding`: means through a compressor, round by round.
- `run`: the `Run` that a method sees, one kind for each kind of method.
- `method_hooks`: calls a method's hooks, and refuses those that there are not.
- `observers`: those who only watch: compute time, the planner, and others.
"""

from paceline.training.kernel import MakeRemote, Training

__all__ = ["MakeRemote", "Training"]
